// Elements from data. Text is only ever set as text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "rect", "path", "line", "title"]);

/** Return a new element with attributes and children; strings become text, null is left out. */
export function h(name, attributes = {}, ...children) {
  const element = SVG_NAMES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

/** Return the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Replace an element's children, unless the reader has selected text in it. */
export function show(element, ...children) {
  const selection = getSelection();
  if (selection && !selection.isCollapsed && element.contains(selection.anchorNode)) return;
  element.replaceChildren(...children.flat().filter((child) => child !== null));
}

/** Return a number with about three digits and separators. */
export function figure(value) {
  const digits = value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Return a share, 0 to 1, in percent. */
export function percent(share) {
  return `${Math.round(100 * share)} %`;
}
