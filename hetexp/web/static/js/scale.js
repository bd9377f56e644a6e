// Where ticks lie, and what they say.

const MINUTE = 60e3;
const DAY = 1440 * MINUTE;
const SPANS = [15e3, 30e3, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, 60 * MINUTE,
  120 * MINUTE, 180 * MINUTE, 240 * MINUTE, 360 * MINUTE, 720 * MINUTE, DAY, 2 * DAY, 5 * DAY, 10 * DAY];

/** The step of 1, 2, 2.5 or 5 × 10ⁿ that cuts `range` into at most `most` pieces; a whole number where asked for. */
function stepOf(range, most, whole = false) {
  const power = 10 ** Math.max(Math.floor(Math.log10(range / most)), whole ? 0 : -Infinity);
  const steps = [1, 2, 2.5, 5, 10].map((one) => one * power).filter((step) => !whole || Number.isInteger(step));
  return steps.find((step) => range / step <= most * 1.0001);
}

/** Round numbers that enclose `low` to `high`: {low, high, ticks}; `whole` ones where they are shown as such. */
export function niceScale(low, high, most, whole = false) {
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const step = stepOf(high - low, most, whole);
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  const ticks = [];
  for (let i = first; i <= last; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return { low: ticks[0], high: ticks.at(-1), ticks };
}

/** Ticks inside `low` to `high`, whole numbers only. */
export function wholeTicks(low, high, most) {
  if (high <= low) return [low];
  const step = Math.max(1, Math.ceil(stepOf(high - low, most)));
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

/** Full minutes, hours or days of the person's own clock between two times in ms. */
export function timeTicks(low, high, most) {
  const span = SPANS.find((one) => (high - low) / one <= most) ?? SPANS.at(-1);
  const zone = new Date(low).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let tick = Math.ceil((low - zone) / span) * span + zone; tick <= high; tick += span) ticks.push(tick);
  return ticks;
}

/** The clock's time of a tick: seconds only where ticks are that near to each other, the date where they are days apart. */
export function timeLabel(at, ticks) {
  if (ticks.length > 1 && ticks[1] - ticks[0] >= DAY) return new Date(at).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const fine = ticks.length > 1 && ticks[1] - ticks[0] < MINUTE;
  return new Date(at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: fine ? "2-digit" : undefined });
}
