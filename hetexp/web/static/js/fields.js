// The fields of the start form: names of options, and settings of the server's allow-list.

import { attribute, h, newId, place, say } from "./dom.js";

/** A field with its label and a place for what is wrong with it. `read()` returns undefined where nothing was typed. */
function field(key, label, input, read, help) {
  const id = newId("field");
  const first = input.tagName === "SELECT" ? input.options[0].text : input.placeholder;
  const wrong = h("p", { class: "field-error", id: `${id}-wrong` });
  attribute(input, "id", id);
  attribute(input, "data-key", key);
  const refuse = (message) => {
    say(wrong, message ?? "");
    attribute(input, "aria-invalid", message ? "true" : null);
  };
  const node = h("div", { class: "field" }, h("label", { for: id }, label), input, help && h("p", { class: "small soft", id: `${id}-help` }, help), wrong);
  input.addEventListener("input", () => refuse(null)); // a new value is not yet checked
  attribute(input, "aria-describedby", help ? `${id}-help ${id}-wrong` : `${id}-wrong`);
  return {
    key,
    node,
    input,
    read,
    /** Say what holds where nothing is typed; null brings back what was said first. */
    unset(text) {
      if (input.tagName === "SELECT") say(input.options[0], text ?? first);
      else input.placeholder = text ?? first;
    },
    refuse,
  };
}

/** A field with names to choose from; the first choice is none of them. */
export function choiceField(key, label, choices, none, help = null) {
  const input = h("select", {}, h("option", { value: "" }, none), choices.map((one) => h("option", { value: one }, one)));
  return field(key, label, input, () => input.value || undefined, help);
}

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** What a field says where nothing is chosen; an experiment has values of its own. */
export const usualText = (usual) => usual === undefined ? "default" : `default: ${usual ?? "none"}`;
export const OF_EXPERIMENT = "as in the experiment";

const asNumber = (typed) => NUMBER.test(typed) ? Number(typed) : typed;

/**
 * A field for one key of the allow-list: {key, kind, choices, description, nullable}. What is no number is sent as it
 * was typed, and the server refuses it by name. `usual` is the value where nothing is typed.
 */
export function settingField({ key, kind, choices, description, nullable }, usual) {
  const label = h("code", {}, key);
  const none = usualText(usual);
  if (choices?.length) return choiceField(key, label, choices, none, description);
  if (kind === "bool") {
    const one = choiceField(key, label, ["true", "false"], none, description);
    return { ...one, read: () => one.input.value === "" ? undefined : one.input.value === "true" };
  }
  const input = h("input", { type: "text", inputmode: /int|float/.test(kind) ? "decimal" : null, placeholder: none, autocomplete: "off", spellcheck: "false" });
  return field(key, label, input, () => {
    const typed = input.value.trim();
    if (typed === "") return undefined;
    if (nullable && typed === "null") return null;
    if (kind === "ints" || kind === "floats") return typed.replace(/^\[|\]$/g, "").split(/[\s,]+/).filter(Boolean).map(asNumber);
    return kind === "int" || kind === "float" ? asNumber(typed) : typed;
  }, nullable && !/null:/.test(description) ? `${description}; null: none` : description);
}

/**
 * Settings that a person adds one by one from the allow-list.
 *
 * @param usual key → value where nothing is typed
 * @param common keys that are there from the beginning
 */
export function settings(allowed, usual, common, changed) {
  const fields = new Map();
  let unset = null;
  const box = h("div", { class: "fields" });
  const select = h("select", { id: "more-settings" });
  const row = h("div", { class: "line adding" }, h("label", { for: "more-settings" }, "Another setting"), select,
    h("button", { type: "button", class: "plain-button", onclick: () => { const one = add(select.value); offer(); one?.input.focus(); } }, "Add"));
  function add(key) {
    const known = allowed.find((one) => one.key === key);
    if (!known || fields.has(key)) return fields.get(key) ?? null;
    const one = settingField(known, usual[key]);
    fields.set(key, one);
    one.unset(unset);
    box.append(one.node);
    one.input.addEventListener("change", changed);
    one.input.addEventListener("input", changed);
    return one;
  }
  function offer() {
    const left = allowed.filter((one) => !fields.has(one.key));
    row.hidden = !left.length;
    place(select, left.map((one) => h("option", { value: one.key }, one.key)));
  }
  common.forEach(add);
  offer();
  return {
    node: h("div", {}, box, row),
    fields: () => [...fields.values()],
    unset(text) { unset = text; for (const one of fields.values()) one.unset(text); },
    /** Return the field of a key, added where the person has not added it. */
    find(key) { const one = add(key); offer(); return one; },
    set(values) { for (const [key, value] of Object.entries(values)) { const one = add(key); if (one) one.input.value = value; } offer(); },
  };
}
