// A new training: its devices, what it trains, and the button that starts it.

import { api, ApiError } from "./api.js";
import { deviceSelector } from "./cards.js";
import { announce, h, place, say } from "./dom.js";
import { choiceField, OF_EXPERIMENT, settings, usualText } from "./fields.js";
import { plural, seconds, whole } from "./format.js";
import { live } from "./live.js";

const GROUPS = ["model", "data", "strategy", "balancing"];
const COMMON = ["trainer.global_batch_size", "trainer.max_steps", "trainer.max_epochs", "trainer.precision"];
const WAIT_MS = 350;
const SLOW_MS = 700; // an estimate that takes longer says so
const draft = { devices: new Set(), added: [], values: {} }; // kept while the person looks at other views

/** The view. */
export function newView({ go }) {
  const selector = deviceSelector(draft, () => { devicesWrong(null); ask(); });
  const form = h("form", { class: "card form", novalidate: true, "aria-labelledby": "what", onsubmit: start });
  const wrong = h("div", { class: "banner bad", role: "alert", hidden: true });
  const devicesError = h("p", { class: "field-error", id: "devices-wrong" });
  const told = h("p", { class: "told", role: "status" });
  const button = h("button", { type: "submit", class: "button" }, "Start training");
  let fields = [];
  let more = null;
  const notes = h("p", { class: "small soft" });
  let timer = 0;
  let slow = 0;
  let asked = 0;
  let asking = false;
  let again = false; // what is wished for has changed meanwhile
  let refused = 0; // which estimate follows a refused start, whose marks stay
  let closed = false;

  const devicesWrong = (message) => say(devicesError, message ?? "");
  const all = () => [...fields, ...(more?.fields() ?? [])];

  async function open() {
    place(form, h("h2", { id: "what" }, "What to train"), h("p", { class: "soft" }, "Asking for the options …"));
    let options;
    try {
      options = await api.options();
    } catch (error) {
      if (!closed) place(form, h("h2", { id: "what" }, "What to train"), h("p", { role: "alert" }, `The options are not known: ${error.message} `,
        h("button", { type: "button", class: "plain-button", onclick: open }, "Ask again")));
      return;
    }
    if (!closed) build(options);
  }
  function build(options) {
    const usual = options.defaults ?? {};
    const none = (key) => usualText(usual[key]);
    const experiments = (options.experiments ?? []).filter((one) => one !== "none"); // what the empty choice says
    fields = [
      ...(experiments.length ? [choiceField("experiment", "Experiment", experiments, "none", "A file of settings; what is chosen below comes on top.")] : []),
      choiceField("model", "Model", options.models ?? [], none("model")),
      choiceField("data", "Data", options.data ?? [], none("data")),
      choiceField("strategy", "Strategy", options.strategies ?? [], none("strategy")),
      choiceField("balancing", "Balancing policy", options.policies ?? [], none("balancing")),
    ];
    for (const one of fields) {
      one.input.value = draft.values[one.key] ?? "";
      one.input.addEventListener("change", ask);
    }
    const allowed = (options.allowed_overrides ?? []).filter((one) => ![...GROUPS, "experiment"].includes(one.key));
    more = settings(allowed, usual, COMMON, ask);
    more.set(Object.fromEntries(Object.entries(draft.values).filter(([key]) => ![...GROUPS, "experiment"].includes(key))));
    selector.cards(options.emulated_cards ?? []);
    place(form, h("h2", { id: "what" }, "What to train"), wrong,
      h("div", { class: "fields" }, fields.map((one) => one.node)),
      h("h3", {}, "Settings"), more.node,
      h("div", { class: "start" }, told, notes, button));
    ask();
  }

  /** Return what is wished for, as the server takes it. */
  function wish() {
    const overrides = {};
    draft.values = {};
    let experiment = null;
    for (const one of all()) {
      const value = one.read();
      if (value === undefined) continue;
      draft.values[one.key] = one.input.value;
      if (one.key === "experiment") experiment = value;
      else overrides[one.key] = value;
    }
    return { experiment, overrides, gpu_ids: selector.ids() };
  }

  function ask() {
    const text = fields.find((one) => one.key === "experiment")?.read() ? OF_EXPERIMENT : null;
    for (const one of fields) if (one.key !== "experiment") one.unset(text);
    more?.unset(text);
    asked += 1;
    clearTimeout(timer);
    timer = setTimeout(estimate, WAIT_MS);
  }
  /** Ask for an estimate of what is wished for; one at a time, since each costs the server seconds. */
  async function estimate() {
    again = asking;
    if (asking) return;
    clearTimeout(slow);
    const { experiment, overrides, gpu_ids: chosen } = wish();
    const candidates = chosen.length ? chosen : selector.usable().filter((one) => !one.busy).map((one) => one.id);
    const mine = asked;
    say(notes, "");
    if (!candidates.length) {
      selector.estimate(null);
      return say(told, "No device is chosen.");
    }
    asking = true;
    slow = setTimeout(() => say(told, "Estimating …"), SLOW_MS);
    const { model = null, data = null, ...rest } = overrides;
    try {
      const answer = await api.estimate({ model, data, ...(experiment ? { experiment } : {}), overrides: rest, gpu_ids: candidates });
      if (mine !== asked || closed) return;
      if (mine !== refused) refuse([]);
      selector.estimate({ ...answer, all: !chosen.length });
      say(told, chosen.length ? summary(chosen.length, answer) : "No device is chosen. The cards say what each would do if all were.");
      say(notes, [answer.problem, ...(answer.notes ?? [])].filter(Boolean).join(" "));
    } catch (error) {
      if (mine !== asked || closed) return;
      if (!(error instanceof ApiError)) throw error;
      selector.estimate(null);
      const left = refuse(error.problems);
      const why = error.problems.length && !left.length ? "a value was refused." : error.problems.length ? left.map((one) => one.message).join(" ") : error.message;
      say(told, `${plural(chosen.length, "device")} chosen. No estimate: ${why}`);
    } finally {
      asking = false;
      clearTimeout(slow);
      if (again && !closed) ask();
    }
  }
  function summary(count, answer) {
    const batch = `${plural(count, "device")} chosen, effective batch ${whole(answer.effective_batch_size)}`;
    const step = answer.predicted_step_seconds ? `, about ${seconds(answer.predicted_step_seconds)} a step` : "";
    const short = (answer.per_device ?? []).filter((one) => one.fits === false).length;
    return `${batch}${step}.${short ? ` ${plural(short, "device")} cannot hold it.` : ""}`;
  }

  /** Show each problem beside its field; returns those that have none. */
  function refuse(problems) {
    for (const one of all()) one.refuse(null);
    devicesWrong(null);
    return problems.filter(({ key, message }) => {
      if (/^gpu_ids|^hardware\.(gpu_ids|devices)/.test(key ?? "")) { devicesWrong(message); return false; }
      const found = all().find((one) => one.key === key) ?? more?.find(key) ?? all().find((one) => key?.startsWith(`${one.key}.`));
      found?.refuse(message);
      return !found;
    });
  }
  async function start(event) {
    event.preventDefault();
    const { experiment, overrides, gpu_ids: chosen } = wish();
    if (!chosen.length) {
      devicesWrong("Choose at least one device.");
      selector.node.querySelector("input, select")?.focus();
      return;
    }
    clearTimeout(timer);
    clearTimeout(slow);
    again = false;
    asked += 1;
    button.disabled = true;
    wrong.hidden = true;
    try {
      const training = await api.start({ ...(experiment ? { experiment } : {}), overrides, gpu_ids: chosen });
      live.take(training);
      announce("The training is started.");
      go(`#/trainings/${encodeURIComponent(training.id)}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      ask();
      refused = asked;
      const left = refuse(error.problems);
      const texts = error.problems.length ? left.map(({ key, message }) => key && !message.includes(key) ? `${key}: ${message}` : message) : [error.message];
      wrong.hidden = false;
      place(wrong, h("p", {}, error.problems.length ? "The training was not started: some values were refused." : "The training was not started."),
        texts.length ? h("ul", {}, texts.map((text) => h("li", {}, text))) : null);
      const first = form.querySelector("[aria-invalid]") ?? (devicesError.textContent && selector.node.querySelector("input, select"));
      if (first) first.focus();
    } finally {
      button.disabled = false;
    }
  }

  const node = h("div", {},
    h("div", { class: "top" }, h("h1", {}, "New training")),
    h("div", { class: "beside" },
      h("section", { "aria-labelledby": "which" }, h("div", { class: "top" }, h("h2", { id: "which" }, "Devices"), selector.recommend), devicesError, selector.node),
      h("section", {}, form)));
  open();
  return { node, title: "New training", close() { closed = true; clearTimeout(timer); clearTimeout(slow); selector.close(); } };
}
