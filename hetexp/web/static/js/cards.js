// The device selector: a card for each device, what it is, how it is, and what the chosen work needs of it.

import { attribute, h, keyed, place, say } from "./dom.js";
import { bytes, whole } from "./format.js";
import { live } from "./live.js";
import { badge, badgeList, deviceBadges, deviceMeters } from "./parts.js";

/**
 * @param draft {devices: Set of ids, added: [{id, name, number, chosen}]}, changed here
 * @param changed called after every change of the choice
 * @returns {node, recommend: a button, estimate(answer or null), cards(emulated cards to offer), ids(), usable(), close()}
 */
export function deviceSelector(draft, changed) {
  const list = h("ul", { class: "cards choices", "aria-label": "Devices" });
  const parts = new Map();
  const recommend = h("button", { type: "button", class: "plain-button", hidden: true, onclick: takeRecommended });
  const offered = h("select", { id: "emulated-card" });
  const add = h("div", { class: "line adding", hidden: true },
    h("label", { for: "emulated-card" }, "Not in this machine"), offered,
    h("button", { type: "button", class: "plain-button", onclick: addEmulated }, "Add"));
  const none = h("p", { class: "soft" });
  let estimate = null;

  // Emulated ones belong to a run; other machines' devices may have the ids of these, and cannot be started from here.
  const here = () => (live.devices ?? []).filter((one) => !one.emulated && one.here !== false);
  const usable = () => here().filter(selectable);
  const items = () => [...here(), ...draft.added.map(standIn)];
  // A card may be added twice, so that its id does not tell it apart.
  const isChosen = (item) => item.number === undefined ? draft.devices.has(item.id) : item.chosen;

  function show() {
    const all = items();
    say(none, live.devices === null ? "Asking for the devices …" : all.length ? "" : "No device is here: add emulated cards.");
    keyed(list, parts, all, (one) => one.number === undefined ? one.id : `emulated ${one.number}`, (one) => chooser(one, { choose, remove }));
    const told = new Map();
    for (const one of estimate?.per_device ?? []) told.set(one.id, [...(told.get(one.id) ?? []), one]);
    for (const item of all) {
      const part = parts.get(item.number === undefined ? item.id : `emulated ${item.number}`);
      const counted = isChosen(item) || estimate?.all;
      const need = counted ? told.get(item.id)?.shift() : null;
      const left = Boolean(estimate) && !estimate.all && isChosen(item) && !need;
      part.choice(isChosen(item), (estimate?.recommended ?? []).includes(item.id), need, left);
    }
    const wanted = recommended();
    say(recommend, `Take the recommended: ${wanted.join(", ")}`);
    recommend.hidden = !wanted.length || (wanted.length === ids().length && wanted.every((one) => draft.devices.has(one)));
  }
  const recommended = () => (estimate?.recommended ?? []).filter((id) => usable().some((one) => one.id === id));
  function takeRecommended() {
    draft.devices = new Set(recommended());
    for (const card of draft.added) card.chosen = false;
    show();
    changed();
    list.querySelector("input:checked")?.focus();
  }
  function choose(item, on) {
    if (item.number !== undefined) draft.added.find((one) => one.number === item.number).chosen = on;
    else if (on) draft.devices.add(item.id);
    else draft.devices.delete(item.id);
    show();
    changed();
  }
  function addEmulated() {
    const number = Math.max(0, ...draft.added.map((one) => one.number)) + 1;
    draft.added.push({ id: offered.value, name: offered.selectedOptions[0].text, number, chosen: true });
    show();
    changed();
  }
  function remove(item) {
    draft.added = draft.added.filter((one) => one.number !== item.number);
    show();
    changed();
    offered.focus();
  }
  function ids() {
    const chosen = usable().filter((one) => draft.devices.has(one.id)).map((one) => one.id);
    return [...chosen, ...draft.added.filter((one) => one.chosen).map((one) => one.id)];
  }
  const off = live.on("devices", show);
  show();
  return {
    node: h("div", {}, none, list, h("div", { class: "actions start adds" }, add)),
    recommend,
    ids,
    usable,
    estimate(next) { estimate = next; show(); },
    cards(cards) {
      add.hidden = false;
      place(offered, cards.map((one) => h("option", { value: one.id }, one.name)), h("option", { value: "cpu" }, "CPU, one more rank"));
    },
    close: off,
  };
}

const selectable = (device) => !device.lost && device.selectable !== false;

/** What was added, as a device: it has no state of its own before the run. */
const standIn = (card) => ({ ...card, emulated: card.id !== "cpu", backend: card.id.split(":")[0] });

/** One card with its box to choose it. */
function chooser(item, { choose, remove }) {
  const box = h("input", { type: "checkbox", onchange: () => choose(item, box.checked) });
  const [badges, meters] = [badgeList(), deviceMeters()];
  const needs = h("p", { class: "needs small" });
  const about = `choose-${item.number === undefined ? item.id : `emulated-${item.number}`}`.replace(/[^\w-]/g, "-");
  attribute(box, "id", about);
  attribute(box, "aria-describedby", `${about}-needs`);
  attribute(needs, "id", `${about}-needs`);
  const added = item.number !== undefined;
  const node = h("li", { class: "card choice" },
    h("div", { class: "head" }, box,
      h("label", { for: about }, item.name, " ", h("code", { class: "soft" }, item.id)),
      added && h("button", { type: "button", class: "plain-button", "aria-label": `Remove ${item.name}`, onclick: () => remove(item) }, "Remove")),
    badges.node, added ? null : meters.nodes, needs);
  let device = item;
  let marked = false;
  function tell() {
    badges.update([...(marked ? [badge("recommended", "good")] : []), ...deviceBadges(device),
      ...(device.environment ? [badge(`environment ${device.environment}`)] : [])]);
  }
  return {
    node,
    update(now) {
      device = now;
      box.disabled = !selectable(now);
      node.classList.toggle("lost", box.disabled);
      if (!added) meters.update(now);
      tell();
    },
    choice(on, recommended, need, left) {
      box.checked = on;
      marked = recommended;
      node.classList.toggle("chosen", on);
      tell();
      node.classList.toggle("short", need?.fits === false);
      say(needs, selectable(device) ? left ? "Left out: the job is quicker without it" : needText(need) : device.reason ?? "It cannot be chosen.");
    },
  };
}

function needText(need) {
  if (!need) return "";
  const passes = need.local_batch_size && need.micro_batch_size < need.local_batch_size ? `, ${whole(need.micro_batch_size)} at a time` : "";
  const work = need.local_batch_size === 0 ? "No sample a step" : `${whole(need.local_batch_size)} samples a step${passes}`;
  const memory = need.memory_bytes === null || need.memory_bytes === undefined ? "" : `, needs ${bytes(need.memory_bytes)}`;
  const fits = need.fits === true ? " – fits" : need.fits === false ? " – does not fit" : "";
  return `${work}${memory}${fits}`;
}
