// Line charts as SVG, each with a sentence and a table that say the same.

import { h, s, say, place, newId } from "./dom.js";
import { clock, number, plural } from "./format.js";
import { niceScale, timeLabel, timeTicks, wholeTicks } from "./scale.js";

const HEIGHT = 190;
const EDGE = { top: 10, right: 12, bottom: 24, left: 52 };
const DASHES = [null, "7 4", "2 3", "9 3 2 3"];
const MOST_ROWS = 24;

/** Class of the nth line's colour, and its dashes, so that colour is not all that tells lines apart. */
export const colourOf = (place) => `v${place % 12 + 1}`;
const dashOf = (place) => DASHES[place % DASHES.length];

/** A piece of the line as the legend shows it. */
function sample(place) {
  return s("svg", { class: `sample ${colourOf(place)}`, width: 18, height: 8, "aria-hidden": "true" },
    s("path", { class: "curve", d: "M0 4H18", "stroke-dasharray": dashOf(place) }));
}

/**
 * A chart of lines over time or steps.
 *
 * @param about {title, format(value), across: "time" | "step", top: highest value or null, zero: whether the axis
 *   begins at 0, whole: whether ticks are whole numbers only, unit: what ticks are round numbers of, 1 where it is
 *   left out, heading: its tag, h3 where it is left out, none: what is said without values}
 * @returns {node, update({series: [{name, place, x: [], y: []}], low, high}), close()}. Times are in ms; null is a gap;
 *   `place` says the line's colour and dashes; `low` and `high` bound the x axis where given.
 */
export function lineChart(about) {
  const legend = h("ul", { class: "legend" });
  const drawn = h("div", { class: "plot" });
  const caption = h("figcaption");
  const table = h("div", { class: "box", tabindex: "0", role: "region", "aria-label": `${about.title}, as a table` });
  const details = h("details", { class: "plain", ontoggle: () => fillTable() }, h("summary", {}, "As a table"), table);
  const title = newId("chart");
  const node = h("figure", { class: "card", "aria-labelledby": title }, h(about.heading ?? "h3", { id: title, class: "small-title" }, about.title), legend, drawn, caption, details);
  let data = { series: [] };
  let frame = 0;
  const watcher = new ResizeObserver(() => draw());
  watcher.observe(drawn);

  function fillTable() {
    if (details.open) place(table, tableOf(about, data));
  }
  function draw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => {
      const width = Math.floor(drawn.clientWidth);
      if (width > 80 && data.series.length) place(drawn, picture(about, data, width));
    });
  }
  return {
    node,
    update(next) {
      data = { ...next, series: next.series.filter((one) => told(one).length) };
      const many = data.series.length > 1;
      const names = data.series.map((one) => one.name).join("\n");
      if (legend.dataset.names !== names) {
        legend.dataset.names = names;
        place(legend, many ? data.series.map((one) => h("li", {}, sample(one.place), one.name)) : []);
      }
      say(caption, sentence(about, data));
      drawn.hidden = details.hidden = data.series.length === 0;
      draw();
      fillTable();
    },
    close() {
      cancelAnimationFrame(frame);
      watcher.disconnect();
    },
  };
}

const told = (series) => series.y.filter((value) => value !== null && value !== undefined);

/** What a chart shows, in words. */
function sentence(about, { series }) {
  const parts = series.flatMap((one) => {
    const values = told(one);
    if (!values.length) return [];
    const [least, most] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    const name = series.length > 1 ? `${one.name}: ` : "";
    return [`${name}${about.format(values.at(-1))} ${about.across === "time" ? "now" : "last"}, ${about.format(least)} to ${about.format(most)}`];
  });
  return parts.length ? `${parts.join("; ")}.` : (about.none ?? "No values yet.");
}

/** The values in a table of at most `MOST_ROWS` rows, the newest first. */
function tableOf(about, { series }) {
  const all = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => b - a);
  const every = Math.max(1, Math.ceil(all.length / MOST_ROWS));
  const places = series.map((one) => new Map(one.x.map((x, i) => [x, one.y[i]])));
  const rows = all.filter((_, i) => i % every === 0);
  return h("table", {},
    h("caption", { class: "small soft" }, every > 1 ? `Each ${every}th of ${plural(all.length, "value")}` : plural(all.length, "value")),
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "left" }, about.across), series.map((one) => h("th", { scope: "col" }, one.name)))),
    h("tbody", {}, rows.map((x) => h("tr", {},
      h("th", { scope: "row", class: "left" }, about.across === "time" ? clock(x) : number(x)),
      places.map((values) => h("td", {}, about.format(values.get(x) ?? null)))))));
}

/** The drawing itself, `width` pixels wide. */
function picture(about, { series, low = null, high = null }, width) {
  const across = series.flatMap((one) => one.x);
  const values = series.flatMap(told);
  const svg = s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${about.title}: ${sentence(about, { series })}` });
  const [least, most] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const unit = about.unit ?? 1;
  const up = niceScale((about.zero ? Math.min(0, least) : least) / unit, (about.top ?? most) / unit, 4, about.whole);
  const [from, to] = [low ?? Math.min(...across), high ?? Math.max(...across)];
  const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  const px = (x) => EDGE.left + (to > from ? (x - from) / (to - from) : 0.5) * inner.width;
  const py = (y) => EDGE.top + (1 - (y / unit - up.low) / (up.high - up.low)) * inner.height;
  for (const tick of up.ticks) {
    svg.append(
      s("line", { class: tick === up.low ? "zero" : "grid", x1: EDGE.left, x2: width - EDGE.right, y1: py(tick * unit), y2: py(tick * unit) }),
      s("text", { class: "tick", x: EDGE.left - 7, y: py(tick * unit) + 4, "text-anchor": "end" }, about.format(tick * unit)));
  }
  const mostTicks = Math.max(2, Math.floor(inner.width / 68));
  const ticks = about.across === "time" ? timeTicks(from, to, mostTicks) : wholeTicks(from, to, mostTicks);
  for (const tick of ticks)
    svg.append(s("text", { class: "tick", x: Math.min(px(tick), width - 16), y: HEIGHT - 6, "text-anchor": "middle" },
      about.across === "time" ? timeLabel(tick, ticks) : number(tick)));
  for (const one of series) {
    const colour = colourOf(one.place);
    const runs = pieces(one, about.across === "time").map((run) => run.map(([x, y]) => [px(x), py(y)]));
    for (const run of runs) {
      const line = run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      if (run.length === 1) svg.append(s("circle", { class: `dot ${colour}`, cx: run[0][0], cy: run[0][1], r: 3.5 }));
      else {
        if (series.length === 1 && about.zero)
          svg.append(s("path", { class: `band ${colour}`, d: `M${line}L${run.at(-1)[0].toFixed(1)} ${py(up.low * unit)}L${run[0][0].toFixed(1)} ${py(up.low * unit)}Z` }));
        svg.append(s("path", { class: `curve ${colour}`, d: `M${line}`, "stroke-dasharray": dashOf(one.place) }));
      }
    }
  }
  point(svg, about, series, { px, from, to, width });
  return svg;
}

/** Cut a line where a value is unknown, and where samples are missing. */
function pieces({ x, y }, timed) {
  const gaps = x.slice(1).map((at, i) => at - x[i]).sort((a, b) => a - b);
  const longest = timed && gaps.length ? 4 * gaps[gaps.length >> 1] + 1 : Infinity;
  const found = [];
  let run = [];
  x.forEach((at, i) => {
    const missing = y[i] === null || y[i] === undefined;
    if (run.length && (missing || at - run.at(-1)[0] > longest)) { found.push(run); run = []; }
    if (!missing) run.push([at, y[i]]);
  });
  if (run.length) found.push(run);
  return found;
}

/** Show the values under the pointer. */
function point(svg, about, series, { px, from, to, width }) {
  const tip = document.getElementById("tip");
  const line = s("line", { class: "pointer", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  svg.append(line);
  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = from + (event.clientX - box.left - EDGE.left) / (width - EDGE.left - EDGE.right) * (to - from);
    const near = series.map((one) => one.x.reduce((best, x, i) => Math.abs(x - wanted) < Math.abs(one.x[best] - wanted) ? i : best, 0));
    const at = series.map((one, i) => one.x[near[i]]).find((x) => x !== undefined);
    if (at === undefined) return hide();
    line.setAttribute("x1", px(at));
    line.setAttribute("x2", px(at));
    line.setAttribute("visibility", "visible");
    const rows = series.map((one, i) => h("div", {}, `${series.length > 1 ? `${one.name} ` : ""}${about.format(one.y[near[i]] ?? null)}`));
    tip.replaceChildren(h("b", {}, about.across === "time" ? clock(at) : `step ${number(at)}`), ...rows);
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - size.width - 6))}px`;
    tip.style.top = `${event.clientY + 18 + size.height > innerHeight ? event.clientY - size.height - 12 : event.clientY + 18}px`;
  });
}
