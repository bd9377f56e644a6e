// What a checker as axe would ask, by hand: names, labels, headings, ids, contrast, width, motion.
() => {
  const found = [];
  const shown = (node) => node.checkVisibility() && !node.closest(".unseen, .skip, [aria-hidden=true]");
  const name = (node) => (node.getAttribute("aria-label") ?? node.getAttribute("aria-labelledby")?.split(" ")
    .map((id) => document.getElementById(id)?.textContent).join(" ") ?? [...(node.labels ?? [])].map((one) => one.textContent).join(" ") ?? "").trim();
  const told = (node) => `${node.tagName.toLowerCase()}.${node.className?.baseVal ?? node.className} “${node.textContent.trim().slice(0, 30)}”`;
  for (const node of document.querySelectorAll("button, a[href], summary"))
    if (shown(node) && !name(node) && !node.textContent.trim()) found.push(`no name: ${told(node)}`);
  for (const node of document.querySelectorAll("input, select, progress, [role=meter], [role=region], svg[role=img], figure, dialog"))
    if (shown(node) && !name(node)) found.push(`no label: ${told(node)}`);
  for (const node of document.querySelectorAll("svg:not([role=img])"))
    if (!node.closest("[aria-hidden=true]")) found.push(`neither named nor hidden: ${told(node)}`);
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((one, i) => ids.indexOf(one) !== i))) found.push(`id twice: ${id}`);
  for (const kind of ["for", "aria-labelledby", "aria-describedby"])
    for (const node of document.querySelectorAll(`[${kind}]`))
      for (const id of node.getAttribute(kind).split(" ")) if (!document.getElementById(id)) found.push(`${kind} leads nowhere: ${id}`);
  const levels = [...document.querySelectorAll("h1, h2, h3, h4")].filter(shown).map((node) => Number(node.tagName[1]));
  levels.forEach((level, i) => { if (level > (levels[i - 1] ?? 0) + 1) found.push(`h${level} after h${levels[i - 1] ?? 0}`); });
  for (const role of ["main", "nav", "header"]) if (document.querySelectorAll(role).length !== 1) found.push(`not one ${role}`);
  if (document.querySelectorAll("[tabindex]:not([tabindex='0'], [tabindex='-1'])").length) found.push("tabindex above 0");

  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const pixel = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !shown(node) || node.closest(":disabled, option, noscript")) continue;
    const behind = [];
    for (let one = node; one; one = one.parentElement) behind.unshift(getComputedStyle(one).backgroundColor);
    const style = getComputedStyle(node);
    const [text, ground] = [pixel([...behind, node instanceof SVGElement ? style.fill : style.color]), pixel(behind)];
    const [a, b] = [light(text), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ${told(node)}`);
    if (style.transitionDuration !== "0s" && matchMedia("(prefers-reduced-motion: reduce)").matches) found.push(`moves: ${told(node)}`);
  }
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`scrolls aside: ${root.scrollWidth} of ${root.clientWidth} px`);
  return found;
}
