// The data of the page, and what all parts of it use: elements, numbers as text, colours, the theme, the dialog.
// Names, paths and tags come from files of strangers: they become text nodes, never HTML.

const data = JSON.parse(document.getElementById("data").textContent);

/** Returns a new element; strings among the children become text, and nulls are left out. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns a paragraph in the secondary colour. */
function muted(...children) {
  return el("p", { class: "muted" }, ...children);
}

/** Returns a paragraph with the sentence for a part that has no data. */
function empty(sentence) {
  return el("p", { class: "empty" }, sentence);
}

/** Returns a new SVG element. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// --- numbers as text ---

/** Returns a number with about four significant digits, for example 12,345 or 0.001235. */
function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "—";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3);
  if (size >= 1000 || Number.isInteger(value)) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

/** Returns a share as a percentage. */
function formatShare(value, digits = 2) {
  return value === null || value === undefined ? "—" : `${(100 * value).toFixed(digits)} %`;
}

/** Returns seconds as text: 12.5 s, 3:05 min or 2:03:05 h. */
function formatSeconds(value) {
  if (value < 60) return `${Number(value.toFixed(2))} s`;
  const seconds = Math.round(value);
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  const pad = (part) => String(part).padStart(2, "0");
  return parts[0] ? `${parts[0]}:${pad(parts[1])}:${pad(parts[2])} h` : `${parts[1]}:${pad(parts[2])} min`;
}

/** Returns a count with its noun. */
function plural(count, noun, many = `${noun}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : many}`;
}

// --- colours ---

const NUM_COLOURS = 6;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/** Returns the colour of a run, the dashes of its line, which differ between runs of one colour, and its swatch. */
function runStyle(place) {
  const [name, dashes] = [`run-${place % NUM_COLOURS}`, Math.floor(place / NUM_COLOURS) % DASHES.length];
  return { name, dash: DASHES[dashes], swatch: `${name} dash-${dashes}` };
}

function swatch(name) {
  return el("i", { class: `swatch ${name}`, "aria-hidden": "true" });
}

const probe = el("span", { hidden: true });
const colours = new Map();

/** Returns a colour of style.css in the present theme, as a canvas needs it. */
function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

// --- theme ---

const themeListeners = [];

function prefersDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Applies a theme, light or dark; null follows the system. */
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const button = document.getElementById("theme");
  const isDark = (theme ?? (prefersDark() ? "dark" : "light")) === "dark";
  button.setAttribute("aria-pressed", String(isDark));
  colours.clear();
  for (const listener of themeListeners) listener();
}

function startTheme() {
  document.body.append(probe);
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    setTheme(button.getAttribute("aria-pressed") === "true" ? "light" : "dark");
  });
  setTheme(null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setTheme(document.documentElement.dataset.theme ?? null);
  });
  // Canvases keep their pixels when a page is printed, so they are drawn again for white paper.
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme ?? null;
    setTheme("light");
  });
  addEventListener("afterprint", () => setTheme(before));
}

// --- dialog ---

const dialog = document.getElementById("dialog");
let opener = null;

/** Shows a dialog; when it closes, the focus returns to the element that had it. */
function openDialog(title, ...children) {
  opener = document.activeElement;
  const close = el("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(
    el("header", {}, el("h2", { id: "dialog-title" }, title), close),
    el("div", { class: "dialog-content" }, ...children),
  );
  dialog.showModal();
  close.focus();
}

function startDialog() {
  dialog.addEventListener("close", () => opener?.focus());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
}
