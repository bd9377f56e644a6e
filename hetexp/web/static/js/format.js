// Numbers as a person reads them. What is unknown is a dash, never 0.

export const UNKNOWN = "–";
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** At least three digits that count: 8,373 or 12.3 or 0.0841. */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return Math.round(value).toLocaleString("en");
  if (size >= 1e-3) return value.toLocaleString("en", { maximumSignificantDigits: 3 });
  return value.toExponential(2);
}

export const whole = (value) => known(value) ? Math.round(value).toLocaleString("en") : UNKNOWN;
export const percent = (value) => known(value) ? `${Math.round(100 * value)} %` : UNKNOWN;
export const exactPercent = (value) => known(value) ? `${(100 * value).toFixed(1)} %` : UNKNOWN;
export const degrees = (value) => known(value) ? `${Math.round(value)} °C` : UNKNOWN;
export const watts = (value) => known(value) ? `${Math.round(value)} W` : UNKNOWN;

/** Bytes in GiB, small ones in MiB. */
export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0 GiB";
  const gib = value / 2 ** 30;
  if (gib >= 0.95) return `${gib.toLocaleString("en", { maximumFractionDigits: gib < 100 ? 1 : 0 })} GiB`;
  return `${Math.round(value / 2 ** 20).toLocaleString("en")} MiB`;
}

export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 60) return `${number(value)} s`;
  const [hours, minutes, rest] = [Math.floor(value / 3600), Math.floor(value / 60) % 60, Math.floor(value % 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
}

/** How long something is ago, which need not change every second. */
export const ago = (value) => value < 60 ? `${Math.round(value)} s` : `${Math.floor(value / 60)} min`;

/** Milliseconds of a time that is seconds, milliseconds or ISO 8601; null where unknown. */
export function moment(time) {
  if (!known(time)) return null;
  if (typeof time === "string") {
    const count = Number(time);
    return Number.isFinite(count) ? moment(count) : Date.parse(time) || null;
  }
  return time > 1e11 ? time : time * 1000;
}

/** The clock's time, with the date where it is another day. */
export function clock(time) {
  const at = moment(time);
  if (at === null) return UNKNOWN;
  const date = new Date(at);
  const hour = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? hour : `${date.toLocaleDateString("en-CA")} ${hour}`;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
