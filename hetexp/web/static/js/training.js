// One training: how far it is, loss and throughput, who does how much, its log, and the button that stops it.

import { api, ApiError } from "./api.js";
import { lineChart } from "./chart.js";
import { confirm } from "./dialog.js";
import { announce, h, place, say } from "./dom.js";
import { clock, exactPercent, moment, number, percent, seconds, whole } from "./format.js";
import { live } from "./live.js";
import { ended, facts, splitBar, stateBadge, tile } from "./parts.js";
import { reportLink } from "./report.js";

const EVERY_MS = 2000;
const NAMES = { pending: "is pending", running: "is running", completed: "is completed", failed: "failed", stopped: "is stopped" };

/** The view. */
export function trainingView({ go, id }) {
  const name = h("h1", {}, id);
  const state = h("span");
  const buttons = h("span", { class: "actions" });
  const [problem, failed, emulated] = [h("p", { class: "banner bad", role: "alert", hidden: true }), h("div"), h("div")];
  const bar = h("progress", { max: "1", "aria-label": "Progress" });
  const far = h("span", { class: "soft" });
  const tiles = { loss: tile("loss"), speed: tile("samples / s"), efficiency: tile("efficiency"), left: tile("time") };
  const loss = lineChart({ title: "Loss", heading: "h2", format: number, across: "step", top: null, zero: false });
  const speed = lineChart({ title: "Samples a second", heading: "h2", format: number, across: "step", top: null, zero: true });
  const split = splitBar();
  const none = h("p", { class: "soft small" }, "Not known yet.");
  const about = facts("wide");
  const log = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Last lines of the log" });
  const whenKnown = h("div", { hidden: true },
    failed, emulated, h("div", { class: "far" }, bar, far), h("dl", { class: "tiles" }, Object.values(tiles).map((one) => one.node)),
    h("div", { class: "figures" }, loss.node, speed.node),
    h("section", { class: "card", "aria-labelledby": "split" }, h("h2", { id: "split" }, "Who does how much"), none, split.node),
    h("section", { class: "card", "aria-labelledby": "log" }, h("h2", { id: "log" }, "Log"), log),
    h("section", { class: "card", "aria-labelledby": "about" }, h("h2", { id: "about" }, "About"), about.node));
  const rows = new Map();
  let now = live.trainings.get(id) ?? null;
  let timer = 0;
  let closed = false;
  let shownState = null;
  let shownButtons = null;

  function show() {
    if (!now) return;
    whenKnown.hidden = false;
    say(name, now.name || id);
    if (shownState !== now.state) {
      place(state, stateBadge(now.state));
      if (shownState !== null) announce(`${now.name || id} ${NAMES[now.state] ?? now.state}.`);
      shownState = now.state;
      place(failed, now.state === "failed" ? h("div", { class: "card failure" }, h("h2", {}, "Why it failed"), h("pre", { tabindex: "0" }, now.error ?? "No reason was written.")) : null);
    }
    const isEmulated = now.emulated ?? (now.gpu_ids ?? []).some((one) => one.startsWith("emulated"));
    if (isEmulated && !emulated.hasChildNodes()) place(emulated, h("p", { class: "banner" }, "Emulated devices: arithmetic is real, speed is modelled. No number here is hardware's."));
    bar.value = now.progress ?? 0;
    say(far, now.steps ? `step ${whole(now.step ?? 0)} of ${whole(now.steps)}, ${percent(now.progress)}` : percent(now.progress));
    tiles.loss.update(number(now.loss));
    tiles.speed.update(number(now.samples_per_second));
    tiles.efficiency.update(exactPercent(now.efficiency), "of the devices' own speeds");
    tiles.left.update(...duration());
    const shares = now.split?.length ? now.split : sharesOf([...rows.values()].at(-1));
    none.hidden = shares.length > 0;
    split.update(shares);
    const tail = (now.log_tail ?? []).join("\n");
    if (log.textContent !== tail) {
      const end = log.scrollTop + log.clientHeight > log.scrollHeight - 30;
      log.textContent = tail || "Nothing is written yet.";
      if (end) log.scrollTop = log.scrollHeight;
    }
    about.update([
      ["Devices", (now.gpu_ids ?? []).join(", ") || "–"], ["Strategy", now.strategy ?? "–"], ["Balancing", now.balancing ?? "–"],
      ["Created", clock(now.created)], ["Started", clock(now.started)], ["Ended", clock(now.ended)],
      ["Run folder", h("code", {}, now.run_dir ?? "–")],
      ["Report", now.report_url ? reportLink(now.report_url, "open the report") : "–"],
    ]);
    act();
  }
  function duration() {
    const [from, to] = [moment(now.started), moment(now.ended)];
    if (from === null) return ["–", now.state === "pending" ? now.waits_for?.length ? `waits for ${now.waits_for.join(", ")}` : "is being started" : ""];
    const took = ((to ?? Date.now()) - from) / 1000;
    const left = now.state === "running" && now.progress > 0.02 ? `about ${seconds(took / now.progress - took)} left` : "";
    return [seconds(Math.max(0, took)), left];
  }
  function act() {
    const wanted = ended(now) ? "ended" : "running";
    if (wanted === shownButtons) return;
    const focused = buttons.contains(document.activeElement);
    shownButtons = wanted;
    place(buttons, wanted === "ended"
      ? h("button", { type: "button", class: "plain-button", onclick: remove }, "Remove from the list")
      : h("button", { type: "button", class: "button danger", onclick: stop }, "Stop"));
    if (focused) buttons.firstChild.focus();
  }
  async function stop() {
    if (!await confirm("Stop this training?", `${now.name || id} ends after the step that it is in, with a checkpoint where one is written.`, "Stop training")) return;
    await done(async () => { const answer = await api.stop(id); if (answer?.id) live.take(answer); announce("The training was told to stop."); });
  }
  async function remove() {
    if (!await confirm("Remove this training from the list?", `Its run folder ${now.run_dir ?? ""} stays.`, "Remove")) return;
    await done(async () => { await api.remove(id); live.drop(id); announce("The training is removed from the list."); go("#/trainings"); });
  }
  async function done(action) {
    problem.hidden = true;
    try {
      await action();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      tell(error.message);
    }
  }
  function tell(text) {
    problem.hidden = false;
    say(problem, text);
  }

  async function ask() {
    clearTimeout(timer);
    let over = false;
    try {
      const last = rows.size ? Math.max(...rows.keys()) : null;
      const [training, news] = await Promise.all([api.training(id), api.metrics(id, last)]);
      if (closed) return;
      for (const row of news) rows.set(row.step, { ...rows.get(row.step), ...row });
      draw();
      live.take(training);
      over = ended(training);
      problem.hidden = true;
    } catch (error) {
      if (closed) return;
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 404) return tell("This server knows no such training.");
      if (error.status !== 0) tell(error.message);
    }
    if (!over) timer = setTimeout(ask, EVERY_MS);
  }
  function draw() {
    const all = [...rows.values()].sort((a, b) => a.step - b.step);
    const line = (label, place, ...keys) => {
      const found = all.map((row) => [row.step, keys.map((key) => row[key]).find((value) => value !== null && value !== undefined)]).filter(([, value]) => value !== undefined);
      return { name: label, place, x: found.map(([step]) => step), y: found.map(([, value]) => value) };
    };
    const [trained, evaluated] = [line("training", 0, "loss", "train/loss"), line("evaluation", 1, "eval_loss", "eval/loss")];
    loss.update({ series: [trained, evaluated] });
    speed.update({ series: [line("all devices", 0, "samples_per_second")] });
  }

  const off = live.on("training", (training) => {
    if (training.id !== id) return;
    const before = now?.state;
    now = training;
    show();
    if (before && before !== now.state) ask(); // the last rows and lines
  });
  show();
  ask();
  return {
    node: h("div", {},
      h("p", { class: "small" }, h("a", { href: "#/trainings" }, "All trainings")),
      h("div", { class: "top" }, h("div", { class: "named" }, name, state), buttons), problem, whenKnown),
    title: id,
    close() {
      closed = true;
      off();
      clearTimeout(timer);
      loss.close();
      speed.close();
    },
  };
}

/** Shares of a metrics row, where the training tells no split. */
function sharesOf(row) {
  return Object.entries(row ?? {}).flatMap(([key, value]) => {
    const found = /^device\/(.+)\/share$/.exec(key);
    return found ? [{ id: found[1], share: value }] : [];
  });
}
