// What the devices do: all together or each by itself, now and over the last minutes to weeks.

import { api } from "./api.js";
import { lineChart } from "./chart.js";
import { h, keyed, place, say } from "./dom.js";
import { bytes, degrees, moment, number, percent, plural, UNKNOWN, watts } from "./format.js";
import { live } from "./live.js";
import { badgeList, deviceBadges, deviceMeters, facts, idOf, meter, reports, switchOf } from "./parts.js";

const RANGES = [[300, "5 min", 3000], [3600, "1 h", 15000], [86400, "1 day", 60000], [7 * 86400, "7 days", 300000], [30 * 86400, "30 days", 300000]];
const POINTS = 240;
const CHARTS = [
  { key: "utilisation", title: "Utilisation", format: percent, across: "time", top: 1, zero: true },
  { key: "memory_used_bytes", title: "Memory used", format: bytes, unit: 2 ** 30, across: "time", top: null, zero: true },
  { key: "temperature_c", title: "Temperature", none: "No device reports it.", format: degrees, across: "time", top: null, zero: false, whole: true },
  { key: "power_w", title: "Power", none: "No device reports it.", format: watts, across: "time", top: null, zero: true, whole: true },
];
const chosen = { view: "aggregated", range: 300 }; // as long as the page is open

/** The view. */
export function systemView() {
  const summary = h("p", { class: "soft" });
  const now = h("div");
  const charts = CHARTS.map((about) => ({ about, chart: lineChart(about) }));
  const problem = h("p", { class: "soft small", role: "status" });
  const parts = { aggregated: together(), per_gpu: apart() };
  let timer = 0;
  let asked = 0;

  function show() {
    place(now, parts[chosen.view].node);
    devices();
  }
  function devices() {
    const all = live.devices;
    if (all === null) return say(summary, "Asking for the devices …");
    const busy = all.filter((one) => one.busy).length;
    const lost = all.filter((one) => one.lost && !one.stale).length;
    const stale = all.filter((one) => one.stale).length;
    const hosts = new Set(all.map((one) => one.host)).size;
    const whole = `${plural(all.length, "device")}${hosts > 1 ? ` of ${plural(hosts, "machine")}` : ""}`;
    say(summary, all.length ? `${whole}, ${busy} busy${lost ? `, ${lost} lost` : ""}${stale ? `, ${stale} stale` : ""}.` : "This machine has no device that hetexp can use.");
    parts[chosen.view].update(all);
  }
  async function history() {
    clearTimeout(timer);
    asked += 1;
    const mine = asked;
    const [, , every] = RANGES.find(([seconds]) => seconds === chosen.range);
    if (!document.hidden) {
      try {
        const series = await api.history(chosen.view, chosen.range, POINTS);
        if (mine !== asked) return;
        draw(series);
        say(problem, "");
      } catch (error) {
        if (mine !== asked) return;
        say(problem, `No history: ${error.message}`);
      }
    }
    timer = setTimeout(history, every);
  }
  function draw(series) {
    const high = Date.now();
    const telling = series.filter((one) => CHARTS.some(({ key }) => one[key]?.some((value) => value !== null)));
    for (const { about, chart } of charts) {
      const lines = telling.map((one, place) => ({
        place,
        name: one.device === null ? "all devices" : `${idOf({ id: one.device, host: one.host })} ${one.name ?? ""}`.trim(),
        x: one.time.map(moment),
        y: one[about.key] ?? [],
      }));
      chart.update({ series: lines, low: high - 1000 * chosen.range, high });
    }
  }
  const view = switchOf("Devices", [["aggregated", "All together"], ["per_gpu", "Each device"]], chosen.view, (value) => {
    chosen.view = value;
    show();
    history();
  });
  const range = switchOf("Time shown", RANGES.map(([seconds, text]) => [seconds, text]), chosen.range, (value) => {
    chosen.range = value;
    history();
  });
  const node = h("div", {},
    h("div", { class: "top" }, h("h1", {}, "System"), view.node),
    summary, now,
    h("section", { "aria-label": "History" },
      h("div", { class: "top" }, h("h2", {}, "History"), range.node), problem,
      h("div", { class: "figures" }, charts.map(({ chart }) => chart.node))));
  show();
  history();
  const off = live.on("devices", devices);
  return {
    node,
    title: "System",
    close() {
      off();
      clearTimeout(timer);
      asked += 1;
      for (const { chart } of charts) chart.close();
    },
  };
}

const known = (all, key) => all.map((one) => one[key]).filter((value) => value !== null && value !== undefined);
const sum = (values) => values.length ? values.reduce((a, b) => a + b, 0) : null;

/** All devices as one. */
function together() {
  const bars = { utilisation: meter("Utilisation, mean"), memory: meter("Memory, sum"), power: meter("Power, sum") };
  const more = facts();
  const node = h("div", { class: "card" }, h("div", { class: "measures" }, Object.values(bars).map((one) => one.node)), more.node);
  return {
    node,
    update(all) {
      const cards = all.some((one) => one.backend !== "cpu") ? all.filter((one) => one.backend !== "cpu") : all; // as in the history
      const present = cards.filter(reports);
      const of = (count) => count && count < cards.length ? ` (${count} of ${cards.length})` : "";
      const busy = known(present, "utilisation");
      const mean = busy.length ? sum(busy) / busy.length : null;
      bars.utilisation.update(mean, percent(mean) + of(busy.length));
      const told = present.filter((one) => known([one], "memory_used_bytes").length && one.memory_total_bytes);
      const [used, total] = [sum(known(told, "memory_used_bytes")), sum(known(told, "memory_total_bytes"))];
      bars.memory.update(total ? used / total : null, total ? `${bytes(used)} of ${bytes(total)}${of(told.length)}` : UNKNOWN, total !== null && used > 0.9 * total);
      const powers = known(present, "power_w");
      const power = sum(powers);
      const limits = known(present.filter((one) => known([one], "power_w").length), "power_limit_w");
      const limit = limits.length === powers.length ? sum(limits) : null;
      bars.power.update(limit ? power / limit : null, (limit ? `${watts(power)} of ${watts(limit)}` : watts(power)) + of(powers.length));
      const heat = known(present, "temperature_c");
      more.update([
        ["Hottest", degrees(heat.length ? Math.max(...heat) : null)],
        ["Busy", `${all.filter((one) => one.busy).length} of ${all.length}`],
        ["Throttled", String(present.filter((one) => one.throttle?.length).length)],
      ]);
    },
  };
}

/** A card for each device. */
function apart() {
  const node = h("ul", { class: "cards" });
  const parts = new Map();
  return { node, update(all) { keyed(node, parts, all, (one) => one.key ?? one.id, deviceCard); } };
}

function deviceCard(device) {
  const [badges, meters, more] = [badgeList(), deviceMeters(), facts()];
  const id = h("code", { class: "soft" });
  const node = h("li", { class: "card" },
    h("h2", { class: "name" }, device.name, " ", id), badges.node, meters.nodes, more.node);
  return {
    node,
    update(now) {
      say(id, idOf(now));
      node.classList.toggle("lost", !reports(now));
      badges.update(deviceBadges(now));
      meters.update(now);
      const limit = now.power_limit_w ? ` of ${watts(now.power_limit_w)}` : "";
      more.update([
        ["Temperature", degrees(now.temperature_c)],
        ["Power", now.power_w === null || now.power_w === undefined ? UNKNOWN : limit ? `${Math.round(now.power_w)}${limit}` : watts(now.power_w)],
        ["Clock", now.clock_mhz ? `${number(now.clock_mhz)} MHz` : UNKNOWN],
        ["Fan", percent(now.fan)],
        ["Environment", now.environment ?? UNKNOWN],
      ]);
    },
  };
}
