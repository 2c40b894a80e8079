// Shows the mistakes of one cell of a confusion matrix, or of one pair of classes; sorts tables; sets the theme.

function showMistakes(evaluation, { label, prediction }) {
  const figures = [...evaluation.querySelectorAll(".mistake")];
  const isShown = ({ dataset }) =>
    label === undefined || (dataset.label === label && dataset.prediction === prediction);
  for (const figure of figures) figure.hidden = !isShown(figure);

  const button = evaluation.querySelector(".all");
  if (!button) return;
  button.hidden = label === undefined;
  const count = figures.filter(isShown).length;
  evaluation.querySelector(".shown").textContent =
    label === undefined
      ? "The largest loss is first."
      : `${label} predicted as ${prediction}: ${count} in this report.`;
  evaluation.querySelector(".mistakes").scrollTop = 0;
  button.parentElement.scrollIntoView({ block: "start" });
  (button.hidden ? evaluation.querySelector(".mistakes") : button).focus({ preventScroll: true });
}

for (const evaluation of document.querySelectorAll(".evaluation")) {
  evaluation.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-label]");
    if (!link && !event.target.matches(".all")) return;
    event.preventDefault();
    showMistakes(evaluation, link ? link.dataset : {});
  });
}

function sortRows(table, head) {
  const rows = [...table.tBodies[0].rows];
  const column = head.cellIndex;
  const isNumeric = rows.some((row) => "value" in row.cells[column].dataset);
  const [first, second] = isNumeric ? ["descending", "ascending"] : ["ascending", "descending"];
  const order = head.getAttribute("aria-sort") === first ? second : first;
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);

  const sign = order === "ascending" ? 1 : -1;
  const compare = (left, right) => {
    if (!isNumeric) return sign * left.textContent.localeCompare(right.textContent, undefined, { numeric: true });
    const [one, other] = [left.dataset.value, right.dataset.value];
    if (!one || !other) return !one - !other; // unknown values are last
    return sign * (one - other);
  };
  rows.sort((left, right) => compare(left.cells[column], right.cells[column]));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll(".sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sortRows(table, button.closest("th"));
  });
}

const THEMES = ["auto", "light", "dark"];
const themeButton = document.querySelector("#theme");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
}

// A browser may refuse to store anything for a local file; the button then works for this page only.
function storedTheme(theme) {
  try {
    if (theme) localStorage.setItem("ddp_trainer_theme", theme);
    return localStorage.getItem("ddp_trainer_theme");
  } catch {
    return null;
  }
}

const stored = storedTheme();
setTheme(THEMES.includes(stored) ? stored : "auto");
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(theme);
  storedTheme(theme);
});
