// Elements, made and brought up to date in place, so that focus and selection stay where they are.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element. Attributes that are null or false are left out, functions named `on…` listen,
 * `style` is an object (set through CSSOM, which the content security policy allows).
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set a node's text where it differs: what is announced or selected is left alone otherwise. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set an attribute where it differs; null or false removes it. */
export function attribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

/** Put `children` into `parent` where they are others than now. */
export function place(parent, ...children) {
  const wanted = children.flat().filter(Boolean);
  const same = wanted.length === parent.childNodes.length && wanted.every((one, i) => parent.childNodes[i] === one);
  if (!same) parent.replaceChildren(...wanted);
}

/**
 * Keep one part for each item, in their order. A part is `{node, update(item)}`.
 *
 * @param parts a Map that the caller keeps, key → part
 */
export function keyed(parent, parts, items, key, make) {
  const left = new Set(parts.keys());
  items.forEach((item, i) => {
    const name = key(item);
    left.delete(name);
    if (!parts.has(name)) parts.set(name, make(item));
    const part = parts.get(name);
    part.update(item);
    if (parent.children[i] !== part.node) parent.insertBefore(part.node, parent.children[i] ?? null);
  });
  for (const name of left) {
    parts.get(name).node.remove();
    parts.delete(name);
  }
}

/** Tell a change of state to those who do not see it. */
export function announce(text) {
  say(document.getElementById("said"), text);
}

let last = 0;
/** Return an id that no other element has. */
export function newId(word) {
  last += 1;
  return `${word}-${last}`;
}
