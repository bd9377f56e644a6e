// All trainings, the newest first.

import { api } from "./api.js";
import { h, keyed, place, say } from "./dom.js";
import { clock, moment, number, percent, seconds, whole } from "./format.js";
import { live } from "./live.js";
import { ended, stateBadge } from "./parts.js";
import { reportLink } from "./report.js";

const PAGE = 50;
const STATES = ["pending", "running", "completed", "failed", "stopped"];

/** The view. */
export function trainingsView() {
  const body = h("tbody");
  const parts = new Map();
  const table = h("div", { class: "box" }, h("table", { class: "trainings" },
    h("caption", { class: "unseen" }, "Trainings, the newest first"),
    h("thead", {}, h("tr", {}, ["training", "state", "progress"].map((name) => h("th", { scope: "col", class: "left" }, name)),
      ["loss", "samples / s", "started", "took"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "left" }, "report"))), body));
  const none = h("p", { class: "soft", role: "status" });
  const older = h("button", { type: "button", class: "plain-button", hidden: true, onclick: () => ask(true) }, "Show older ones");
  const filter = h("select", { id: "state", onchange: () => { shown.clear(); ask(false); } }, h("option", { value: "" }, "all"), STATES.map((one) => h("option", {}, one)));
  const shown = new Map();

  function show() {
    const all = [...shown.values()].sort((a, b) => (moment(b.created) ?? 0) - (moment(a.created) ?? 0));
    table.hidden = !all.length;
    keyed(body, parts, all, (one) => one.id, row);
  }
  async function ask(more) {
    const state = filter.value;
    try {
      const found = await api.trainings({ state, limit: PAGE, offset: more ? shown.size : 0 });
      if (state !== filter.value) return;
      if (!more) shown.clear();
      for (const one of found) shown.set(one.id, one);
      older.hidden = found.length < PAGE;
      place(none, shown.size ? [] : state ? `No training is ${state}.` : ["No training yet. ", h("a", { href: "#/new" }, "Start one")]);
    } catch (error) {
      say(none, `The trainings are not known: ${error.message}`);
    }
    show();
  }
  const off = live.on("training", (training) => {
    if (filter.value && training.state !== filter.value) shown.delete(training.id);
    else shown.set(training.id, { ...shown.get(training.id), ...training });
    if (shown.size) place(none);
    show();
  });
  const gone = live.on("deleted", (id) => { shown.delete(id); show(); });
  const again = live.on("state", (state) => { if (state === "live") ask(false); });
  ask(false);
  return {
    node: h("div", {},
      h("div", { class: "top" }, h("h1", {}, "Trainings"), h("span", { class: "line" }, h("label", { for: "state" }, "State"), filter)),
      none, table, h("div", { class: "actions start" }, older)),
    title: "Trainings",
    close() { off(); gone(); again(); },
  };
}

function row(training) {
  const state = h("td", { class: "left", "data-name": "state" });
  const [bar, words] = [h("progress", { max: "1", "aria-label": `Progress of ${training.name}` }), h("span", { class: "small" })];
  const cells = ["loss", "samples / s", "started", "took"].map((name) => h("td", { "data-name": name }));
  const report = h("td", { class: "left", "data-name": "report" });
  const node = h("tr", {},
    h("th", { scope: "row", class: "name" }, h("a", { href: `#/trainings/${encodeURIComponent(training.id)}` }, training.name || training.id),
      h("small", {}, `${(training.gpu_ids ?? []).join(", ")} · ${[training.strategy, training.balancing].filter(Boolean).join(", ")}`)),
    state, h("td", { class: "left progress", "data-name": "progress" }, bar, words), cells, report);
  let url = null;
  return {
    node,
    update(now) {
      if (state.textContent !== now.state) place(state, stateBadge(now.state));
      bar.value = now.progress ?? 0;
      say(words, now.steps ? `${whole(now.step ?? 0)} of ${whole(now.steps)}` : percent(now.progress));
      const [from, to] = [moment(now.started), moment(now.ended) ?? (ended(now) ? null : Date.now())];
      const texts = [number(now.loss), number(now.samples_per_second), clock(now.started), seconds(from !== null && to !== null ? (to - from) / 1000 : null)];
      cells.forEach((cell, i) => say(cell, texts[i]));
      if (url !== (now.report_url ?? "")) {
        url = now.report_url ?? "";
        place(report, url ? reportLink(url, "report", `Report of ${now.name}`) : h("span", { class: "soft" }, "–"));
      }
    },
  };
}
