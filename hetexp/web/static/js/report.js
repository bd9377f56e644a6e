// The link to a training's report.

import { h } from "./dom.js";

/** A link that opens `url`; only addresses of this server are followed. */
export function reportLink(url, text, label = null) {
  const address = new URL(url, location.href);
  if (address.origin !== location.origin) return h("span", { class: "soft" }, "–");
  return h("a", { href: address.href, target: "_blank", rel: "noopener", "aria-label": label }, text);
}
