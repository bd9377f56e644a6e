// Small parts that several views use.

import { h, say, attribute, newId, place } from "./dom.js";
import { ago, bytes, exactPercent, percent, UNKNOWN } from "./format.js";
import { colourOf } from "./chart.js";
import { live } from "./live.js";

export const badge = (text, kind = "", about = null) => h("span", { class: `badge ${kind}`, title: about }, text);

const STATES = { pending: "", running: "accent", completed: "good", failed: "bad", stopped: "warn" };
export const stateBadge = (state) => badge(state, STATES[state] ?? "");
export const ended = (training) => ["completed", "failed", "stopped"].includes(training.state);

/** A group of buttons of which one is pressed. `update(value)` presses another. */
export function switchOf(label, choices, value, chosen) {
  const buttons = choices.map(([of, text]) => h("button", { type: "button", "data-value": of, onclick: () => { update(of); chosen(of); } }, text));
  function update(now) {
    for (const button of buttons) attribute(button, "aria-pressed", String(button.dataset.value === String(now)));
  }
  update(value);
  return { node: h("span", { class: "switch", role: "group", "aria-label": label }, buttons), update };
}

/** A bar with its value in words. `update(fraction, text, high)`; null is unknown; `high` warns. */
export function meter(label) {
  const name = newId("meter");
  const filled = h("div", { class: "filled" });
  const bar = h("div", { class: "meter", role: "meter", "aria-labelledby": name, "aria-valuemin": "0", "aria-valuemax": "100" }, filled);
  const text = h("span", { class: "value" });
  const node = h("div", { class: "measure" }, h("span", { class: "label", id: name }, label), text, bar);
  return {
    node,
    update(fraction, words, high = false) {
      const known = fraction !== null && fraction !== undefined;
      say(text, words);
      attribute(bar, "aria-valuenow", known ? Math.round(100 * fraction) : 0);
      attribute(bar, "aria-valuetext", known ? words : "unknown");
      bar.classList.toggle("unknown", !known);
      bar.classList.toggle("high", high);
      filled.style.width = `${known ? Math.max(0, Math.min(100, 100 * fraction)) : 0}%`;
    },
  };
}

/** Bars of utilisation and memory of a device. */
export function deviceMeters() {
  const [utilisation, memory] = [meter("Utilisation"), meter("Memory")];
  return {
    nodes: [utilisation.node, memory.node],
    update(device) {
      utilisation.update(device.utilisation, percent(device.utilisation));
      const [used, total] = [device.memory_used_bytes, device.memory_total_bytes];
      const known = used !== null && used !== undefined && total;
      const words = known ? `${bytes(used)} of ${bytes(total)}` : total ? `${UNKNOWN} of ${bytes(total)}` : UNKNOWN;
      memory.update(known ? used / total : null, words, known && lowMemory(device));
    },
  };
}

/** Less than a tenth of the memory is free. */
export function lowMemory(device) {
  const { memory_used_bytes: used, memory_total_bytes: total, memory_free_bytes: told } = device;
  if (!total) return false;
  const free = told ?? (used === null || used === undefined ? null : total - used);
  return free !== null && free < total / 10;
}

/** A run's name where it is one of the trainings. */
const nameOf = (run) => live.trainings.get(run)?.name || run;

/** A device's id, with its machine where there are several. */
export function idOf(device) {
  const several = new Set((live.devices ?? []).map((one) => one.host)).size > 1;
  return several && device.host ? `${device.id}@${device.host}` : device.id;
}

/** Whether a device is there to be counted: neither lost nor silent. */
export const reports = (device) => !device.lost && !device.stale;

/** What a device is and how it is, as badges. */
export function deviceBadges(device) {
  const by = device.busy_by;
  return [
    device.stale && badge(`stale: silent for ${ago(device.age_seconds)}`, "bad", "Its machine sends no samples"),
    device.lost && badge("lost", "bad", "The machine no longer finds it"),
    !device.lost && device.state === "unusable" && badge("unusable", "bad"),
    device.busy && badge(by?.run ? `busy: ${nameOf(by.run)}${by.rank === null || by.rank === undefined ? "" : `, rank ${by.rank}`}` : "busy", "warn"),
    lowMemory(device) && badge("low memory", "warn", "Less than a tenth is free"),
    ...(device.throttle ?? []).map((reason) => badge(`throttled: ${reason}`, "warn")),
    device.emulated && badge("emulated", "model", "Arithmetic is real, speed is modelled"),
    device.vendor && badge(device.vendor),
    device.backend && ![device.vendor, "emulated"].includes(device.backend) && badge(device.backend),
    device.integrated && badge("integrated"),
  ].filter(Boolean);
}

/** Badges that are only replaced where they change. */
export function badgeList() {
  const node = h("ul", { class: "badges" });
  let shown = null;
  return {
    node,
    update(badges) {
      const key = badges.map((one) => one.className + one.textContent).join("\n");
      if (key === shown) return;
      shown = key;
      place(node, badges.map((one) => h("li", {}, one)));
    },
  };
}

/** Who does how much, as a bar of parts with a list that says the same. `update([{id, share}])`. */
export function splitBar() {
  const bar = h("div", { class: "split", "aria-hidden": "true" });
  const list = h("ul", { class: "legend" });
  const node = h("div", {}, bar, list);
  return {
    node,
    update(split) {
      const parts = split ?? [];
      if (bar.children.length !== parts.length) {
        place(bar, parts.map((_, i) => h("div", { class: `part ${colourOf(i)}` })));
        place(list, parts.map((_, i) => h("li", {}, h("span", { class: `key ${colourOf(i)}`, "aria-hidden": "true" }), h("span"))));
      }
      parts.forEach((one, i) => {
        bar.children[i].style.width = `${100 * (one.share ?? 0)}%`;
        say(list.children[i].lastChild, `${one.name ?? one.id} ${exactPercent(one.share)}`);
      });
    },
  };
}

/** Facts under their names. `update([[name, value or node]])`. */
export function facts(kind = "") {
  const node = h("dl", { class: `facts ${kind}` });
  let shown = null;
  return {
    node,
    update(pairs) {
      const key = pairs.map(([name, value]) => `${name}:${value?.textContent ?? value}`).join("\n");
      if (key === shown) return;
      shown = key;
      place(node, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    },
  };
}

/** A figure with its name; `update(value, name, beside)`. */
export function tile(name) {
  const [value, beside] = [h("dd", { class: "figure" }), h("dd", { class: "soft small" })];
  const node = h("div", { class: "tile" }, h("dt", {}, name), value, beside);
  return { node, update(text, more = "") { say(value, text); say(beside, more); } };
}
