// The few DOM moves that the console makes. Data enters the page as text only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; `on…` attributes are listeners, null and false are left out. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Set the text where it differs: an unchanged page costs no layout. */
export function say(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** Set or remove an attribute where it differs. */
export function mark(node, name, value) {
  const wanted = value === null || value === undefined || value === false ? null : value === true ? "" : String(value);
  if (node.getAttribute(name) === wanted) return;
  if (wanted === null) node.removeAttribute(name);
  else node.setAttribute(name, wanted);
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");

function slide(before) {
  for (const [node, top] of before) {
    const moved = top - node.getBoundingClientRect().top;
    if (moved && node.isConnected) node.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], 240);
  }
}

/**
 * Make `parent`'s children those of `items`, in that order: a child stays the same element as long as its key is there,
 * and only what is out of place moves. `make(item)` builds a child, `update(child, item, index)` writes into it.
 */
export function keyed(parent, items, key, make, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const name = String(key(item));
    let child = kept.get(name);
    kept.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    return child;
  });
  const moves = !calm.matches && wanted.some((child, index) => child.isConnected && parent.children[index] !== child);
  const before = moves
    ? wanted.filter((child) => child.isConnected).map((child) => [child, child.getBoundingClientRect().top])
    : [];
  for (const child of kept.values()) child.remove();
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, items[index], index);
  });
  if (before.length) slide(before);
}

/** The first item of each key: keyed lists need unique keys, and data need not have them. */
export function unique(items, key) {
  const seen = new Set();
  return items.filter((item) => {
    const name = key(item);
    return seen.has(name) ? false : seen.add(name);
  });
}

/** A group of radio buttons drawn as one switch. `options`: [[value, label]]; calls `chosen(value)`. */
export function radios(group, name, options, value, chosen) {
  keyed(
    group,
    options,
    ([option]) => option,
    ([option, label]) =>
      h(
        "label",
        {},
        h("input", { type: "radio", name, value: option, onchange: () => chosen(option) }),
        h("span", {}, label),
      ),
    (label, [option]) => {
      label.firstChild.checked = option === value;
    },
  );
}
