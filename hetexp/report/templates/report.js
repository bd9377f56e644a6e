"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // Tips: a mark's <title> is read once, so that a finger gets it as well as a mouse.
  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
  }
  function hide() { tip.hidden = true; }
  for (const title of document.querySelectorAll("figure svg * > title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  for (const title of document.querySelectorAll("figure svg > title")) {
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  for (const text of document.querySelectorAll("figure svg [data-full]"))
    if (text.textContent !== text.dataset.full) text.dataset.tip = text.dataset.full;
  for (const kind of ["pointermove", "pointerdown"])
    document.addEventListener(kind, (event) => {
      const mark = event.target.closest && event.target.closest("[data-tip]");
      if (mark) show(mark.dataset.tip, event.clientX, event.clientY);
      else if (!event.target.closest || !event.target.closest(".live")) hide();
    });
  addEventListener("scroll", hide, { passive: true });

  // Sorting: numbers by value, names by alphabet, unknown values last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "none" ? place > 0 : head.getAttribute("aria-sort") === "ascending";
      heads.forEach((one) => one.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[place].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const order = place ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  // Paper shows what is folded on a screen; a long list of runs stays folded.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open])")].filter((one) => one.querySelectorAll("tr").length <= 60);
    unfolded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => unfolded.forEach((one) => { one.open = false; }));

  // Light or dark.
  const redraw = [];
  document.getElementById("theme").addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("hetexp-theme", root.dataset.theme); } catch (error) { /* no storage */ }
    redraw.forEach((one) => one());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw.forEach((one) => one()));

  // Losses: drawn by uPlot on a screen, by the SVG beside it on paper.
  const hosts = [...document.querySelectorAll(".live")];
  if (!hosts.length) return;
  const variants = data.variants.filter((one) => one.drawn && (one.drawn.train || one.drawn.eval));
  const means = variants.flatMap((one) => ["train", "eval"].flatMap((kind) => one.drawn[kind] ? one.drawn[kind].mean : []));
  const options = { metric: "both", log: Math.min(...means) > 0 && Math.max(...means) > 50 * Math.min(...means) ? "log" : "" };
  const hidden = new Set();
  const unzoom = document.getElementById("unzoom");
  const MOST_BANDS = 4;
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function seconds(value) {
    for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
      if (Math.abs(value) >= size) return +(value / size).toPrecision(3) + " " + unit;
    return value ? +(value / 1e-9).toPrecision(3) + " ns" : "0";
  }
  const short = (value) => Math.abs(value) >= 1e6 ? +(value / 1e6).toPrecision(6) + "M"
    : Math.abs(value) >= 1e4 ? +(value / 1e3).toPrecision(6) + "k" : String(+value.toPrecision(6));

  // The next 1, 2 or 5 times a power of ten below or above: the axis names its ends.
  function rounded(value, way) {
    const power = 10 ** Math.floor(Math.log10(value));
    const steps = [1, 2, 5, 10].map((one) => one * power);
    return way < 0 ? steps.filter((one) => one <= value * 1.0001).pop() : steps.find((one) => one >= value * 0.9999);
  }

  function draw(host) {
    const axis = host.dataset.axis;
    const write = axis === "seconds" ? seconds : short;
    const shown = [];
    for (const one of variants) {
      if (hidden.has(one.number)) continue;
      for (const kind of ["train", "eval"]) {
        const curve = one.drawn[kind];
        if (curve && (options.metric === "both" || options.metric === kind)) shown.push({ one, kind, curve });
      }
    }
    if (host.plot) { host.plot.destroy(); host.plot = null; }
    const series = [{}];
    const bands = [];
    const tables = shown.map(({ one, kind, curve }) => {
      const colour = css("--" + one.drawn.colour);
      const banded = kind === "train" && curve.low.length && variants.length - hidden.size <= MOST_BANDS;
      series.push({
        label: one.label, stroke: colour, width: kind === "train" ? 2 : 1.5, dash: kind === "train" ? [] : [5, 4], spanGaps: true,
        points: { show: kind === "eval" || curve.mean.length < 2, size: 7, fill: colour, stroke: css("--card") },
      });
      if (!banded) return [curve[axis], curve.mean];
      for (let i = 0; i < 2; i++) series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [series.length - 1, series.length - 2], fill: colour + "2e" });
      return [curve[axis], curve.mean, curve.low, curve.high];
    });
    if (!tables.length) { host.textContent = ""; return; }
    const ruled = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    host.plot = new uPlot({
      width: host.clientWidth, height: 300, series, bands, legend: { show: false },
      scales: { x: { time: false }, y: options.log ? { distr: 3, range: (_, low, high) => [rounded(0.9 * low, -1), rounded(1.1 * high, 1)] } : {} },
      axes: [
        { ...ruled, values: (_, ticks) => ticks.map(write), space: host.clientWidth < 400 ? 48 : 64, label: axis === "seconds" ? "training time, evaluations left out" : "samples trained on", labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0, size: 30 },
        { ...ruled, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : short(tick)), size: 52 },
      ],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(plot) => point(plot, shown, axis, write)],
        setScale: [(plot, name) => { if (name === "x") zoomed(); }],
      },
    }, uPlot.join(tables), host);
    host.plot.over.addEventListener("mouseleave", hide);
  }

  function point(plot, shown, axis, write) {
    const { left, top } = plot.cursor;
    if (left < 0) return hide();
    let found = null;
    let least = 40;
    for (const { one, kind, curve } of shown)
      for (let i = 0; i < curve.mean.length; i++) {
        const far = Math.hypot(plot.valToPos(curve[axis][i], "x") - left, plot.valToPos(curve.mean[i], "y") - top);
        if (far < least) { least = far; found = { one, kind, curve, i }; }
      }
    if (!found) return hide();
    const { one, kind, curve, i } = found;
    const box = plot.over.getBoundingClientRect();
    const name = kind === "train" ? "training" : "evaluation";
    const where = axis === "seconds" ? "after " + write(curve.seconds[i]) : "after " + write(Math.round(curve.samples[i])) + " samples";
    show(`${one.number} ${one.label}${one.valid ? "" : " (invalid)"}: ${name} loss ${+curve.mean[i].toPrecision(4)} ${where} (step ${curve.steps[i]})`,
      box.left + plot.valToPos(curve[axis][i], "x"), box.top + plot.valToPos(curve.mean[i], "y"));
  }

  function zoomed() {
    const whole = (plot) => plot.scales.x.min <= plot.data[0][0] && plot.scales.x.max >= plot.data[0][plot.data[0].length - 1];
    unzoom.hidden = hosts.every((host) => !host.plot || whole(host.plot));
  }

  function all() {
    for (const host of hosts) {
      host.parentNode.classList.add("is-live");
      try {
        draw(host);
      } catch (error) {  // the drawing beneath it still tells everything
        host.parentNode.classList.remove("is-live");
        throw error;
      }
    }
  }
  redraw.push(all);
  unzoom.addEventListener("click", all);
  for (const button of document.querySelectorAll(".toggle"))
    button.addEventListener("click", () => {
      const number = Number(button.dataset.number);
      if (!hidden.delete(number)) hidden.add(number);
      button.setAttribute("aria-pressed", String(!hidden.has(number)));
      all();
    });
  for (const group of document.querySelectorAll(".switch")) {
    const press = () => group.querySelectorAll("button").forEach((one) =>
      one.setAttribute("aria-pressed", String(one.dataset.value === options[group.dataset.option])));
    group.addEventListener("click", (event) => {
      if (!event.target.dataset || event.target.dataset.value === undefined) return;
      options[group.dataset.option] = event.target.dataset.value;
      press();
      all();
    });
    press();
  }
  all();
  new ResizeObserver(() => hosts.forEach((host) => {
    if (host.plot && host.clientWidth && host.clientWidth !== host.plot.width) host.plot.setSize({ width: host.clientWidth, height: 300 });
  })).observe(document.querySelector("main"));
})();
