// The evaluations: scores, confusion, classes and the worst mistakes of the selected one.

const GALLERY = 24;
const MAX_SMALL = 14; // classes of a matrix that leaves room beside it

/** Returns the lines of a list of facts; those without a value are left out. */
function facts(values) {
  return Object.entries(values).filter(([, value]) => value !== "" && value !== "—").map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

function scoresCard(evaluation) {
  const { split, checkpoint, step, epoch, top1, top5, loss, count } = evaluation;
  const scores = { "top-1": formatShare(top1), "top-5": formatShare(top5), loss: formatNumber(loss),
    "calibration error": formatShare(evaluation.calibration_error) };
  const about = { images: formatNumber(count), split, checkpoint, step: formatNumber(step), epoch: formatNumber(epoch),
    data: evaluation.data };
  return el("div", { class: "card" },
    el("dl", { class: "scores" }, facts(scores)), el("dl", { class: "facts" }, facts(about)));
}

function confusionPart(evaluation) {
  // Where several classes have the same name, mistakes refer to the first of them.
  evaluation.references = evaluation.classes.map((name) => evaluation.classes.indexOf(name));
  if (evaluation.matrix.length) {
    return [el("h3", {}, "Confusion matrix"),
      muted("A row for each true class, shaded by its share of the row. A cell opens its mistakes; the arrow keys move",
        " between cells."),
      el("div", { class: "scroll matrix-box" }, matrixGrid(evaluation))];
  }
  if (evaluation.pairs.length) {
    return [el("h3", {}, "Most confused pairs"),
      muted(`Of ${plural(evaluation.numClasses, "class", "classes")}, the pairs with the most mistakes. Each opens its`,
        " mistakes."),
      pairList(evaluation)];
  }
  return [el("h3", {}, "Confusion matrix"), empty("There is no confusion_matrix.csv with mistakes.")];
}

// --- the table of classes ---

const COLUMNS = ["Class", "Precision", "Recall", "F1", "Images"];

function classesPart(evaluation) {
  const { perClass, numClasses } = evaluation;
  if (!perClass.length) return [];
  const rows = perClass.map(([reference, ...values]) => {
    const name = className(evaluation, reference);
    const node = el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, name)),
      values.slice(0, 3).map((value) => el("td", {}, shareCell(value))), el("td", {}, formatNumber(values[3])));
    return { node, values: [name, ...values] };
  });
  const isCut = perClass.length < numClasses;
  const sentence = `The ${formatNumber(perClass.length)} of ${formatNumber(numClasses)} classes with the lowest F1.`;
  return [el("h3", {}, "Classes"),
    isCut ? muted(sentence) : null,
    el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Scores of the classes" },
      sortableTable(COLUMNS, rows))];
}

/** Returns a table that the buttons in its head sort. rows: { node, values }. */
function sortableTable(names, rows) {
  const body = el("tbody", {}, rows.map(({ node }) => node));
  const heads = names.map((name, place) => el("th", { scope: "col", "aria-sort": "none" },
    el("button", { type: "button", onclick: () => sort(place) }, name)));
  let [sorted, direction] = [null, 1];
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? Infinity) - (b ?? Infinity));
  const sort = (place) => {
    [sorted, direction] = [place, sorted === place ? -direction : 1];
    rows.sort((a, b) => direction * compare(a.values[place], b.values[place]));
    const state = direction > 0 ? "ascending" : "descending";
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === place ? state : "none"));
    body.replaceChildren(...rows.map(({ node }) => node));
  };
  return el("table", { class: "plain sortable" }, el("thead", {}, el("tr", {}, heads)), body);
}

/** Returns a share as text over a bar. */
function shareCell(value) {
  const bar = el("i", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
  return el("span", { class: "with-bar" }, bar, el("span", {}, formatShare(value, 1)));
}

// --- worst mistakes ---

function galleryPart(evaluation) {
  const { mistakes, numMistakes } = evaluation;
  const title = el("h3", {}, "Worst mistakes");
  if (!mistakes.length) return [title, empty("There is no mistakes.json, or it has no mistakes.")];
  const host = el("div", { class: "mistakes" });
  const more = el("button", { type: "button", class: "button", onclick: () => show() }, "Show more");
  const show = () => {
    const start = host.children.length;
    host.append(...mistakes.slice(start, start + GALLERY).map((mistake) => mistakeFigure(evaluation, mistake)));
    more.hidden = host.children.length >= mistakes.length;
  };
  show();
  const isCut = numMistakes > mistakes.length;
  const part = isCut ? `${mistakes.length} of ${formatNumber(numMistakes)} are in this report. ` : "";
  return [title, muted(part, "The largest loss is first."), host, more];
}

// --- the selected evaluation ---

function evaluationPanel(evaluation) {
  const isSmall = evaluation.matrix.length <= MAX_SMALL;
  const confusion = confusionPart(evaluation);
  return [
    scoresCard(evaluation),
    isSmall ? null : el("div", {}, confusion),
    el("div", { class: "columns" },
      el("div", {}, isSmall ? confusion : null, classesPart(evaluation)),
      el("div", {}, calibrationPart(evaluation))),
    el("div", {}, galleryPart(evaluation)),
  ].filter(Boolean);
}

function startEvaluations() {
  const { evaluations } = data;
  if (!evaluations.length) return;
  const panel = el("div", { id: "panel" });
  const name = ({ run, folder }) => (runs.length > 1 ? `${runs[run].name} · ${folder}` : folder);
  const show = (evaluation) => panel.replaceChildren(...evaluationPanel(evaluation));
  const select = el("select", { onchange: () => show(evaluations[select.value]) },
    evaluations.map((evaluation, place) => el("option", { value: place }, name(evaluation))));
  document.getElementById("evaluations").replaceChildren(evaluations.length > 1
    ? el("div", { class: "toolbar" }, el("label", { class: "control" }, "Evaluation ", select))
    : muted(el("bdi", {}, name(evaluations[0]))), panel);
  show(evaluations[0]);
}
