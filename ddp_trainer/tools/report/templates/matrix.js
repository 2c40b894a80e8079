// The confusion matrix, or the most confused pairs of many classes, and the mistakes behind each cell.

/** Returns the name of a class, which is given by its index in the list of names or by its name. */
function className(evaluation, reference) {
  return typeof reference === "number" ? evaluation.classes[reference] : reference;
}

/** Returns the two classes of a mistake as an element. */
function pairOfNames(evaluation, label, prediction) {
  return el("span", { class: "names" },
    el("bdi", {}, className(evaluation, label)),
    el("span", { class: "muted" }, " predicted as "),
    el("bdi", { class: "wrong" }, className(evaluation, prediction)));
}

/** Returns a mistake as a figure: the picture, the true and the predicted class, probability, loss and path. */
function mistakeFigure(evaluation, [path, label, prediction, probability, loss, picture]) {
  return el("figure", { class: "mistake" },
    pictureOf(picture, path),
    el("figcaption", {},
      pairOfNames(evaluation, label, prediction),
      el("span", { class: "muted" }, `probability ${formatShare(probability, 1)}`),
      el("span", { class: "muted" }, `loss ${formatNumber(loss)}`),
      el("span", { class: "path" }, path)));
}

/** Returns a picture; a small one is enlarged by whole pixels. */
function pictureOf(picture, path) {
  if (!picture) return el("div", { class: "no-picture muted" }, "no picture");
  const [width, height, src] = picture;
  const scale = Math.max(1, Math.floor(112 / Math.max(width, height)));
  const size = { width: width * scale, height: height * scale };
  return el("img", { src, ...size, alt: path, class: scale > 1 ? "pixels" : null });
}

/** Opens the mistakes of a cell. */
function openCell(evaluation, label, prediction, count) {
  const [truth, predicted] = [className(evaluation, label), className(evaluation, prediction)];
  if (label === prediction) {
    const verb = count === 1 ? "was" : "were";
    openDialog(truth, el("p", {}, `${plural(count, "image")} of this class ${verb} classified correctly.`));
    return;
  }
  const shown = evaluation.mistakes.filter((mistake) => mistake[1] === label && mistake[2] === prediction);
  let sentence = `${plural(count, "mistake")}, the worst first.`;
  if (count === 0) sentence = "No image of this class was predicted as the other.";
  else if (shown.length < count) {
    sentence = `${shown.length} of the ${plural(count, "mistake")} are in this report, the worst first.`;
  }
  openDialog(`${truth} predicted as ${predicted}`, muted(sentence),
    el("div", { class: "mistakes" }, shown.map((mistake) => mistakeFigure(evaluation, mistake))));
}

/** Returns the matrix as a grid of buttons. The arrow keys, Home and End move, Enter, Space or a click opens a cell. */
function matrixGrid(evaluation) {
  const { classes, matrix } = evaluation;
  const cells = matrix.map((counts, row) => matrixRow(evaluation, counts, row));
  cells[0][0].tabIndex = 0;
  const heads = classes.map((name) => el("th", { scope: "col", title: name }, el("span", {}, el("bdi", {}, name))));
  const rows = cells.map((row, i) => el("tr", { role: "row" },
    el("th", { scope: "row", title: classes[i] }, el("bdi", {}, classes[i])),
    row.map((cell) => el("td", { role: "gridcell" }, cell))));
  const density = matrix.length > 30 ? "tiny" : matrix.length > 14 ? "dense" : "";
  const direction = classes.every((name) => name.length <= 3) ? "upright" : "";
  return el("table", { class: `matrix ${density} ${direction}`, role: "grid", "aria-label": "Confusion matrix",
    onkeydown: (event) => moveFocus(event, cells), onfocusin: (event) => markTabStop(event.target, cells) },
    el("thead", {}, el("tr", { role: "row" }, el("td", { class: "corner" }, "true ↓ predicted →"), heads)),
    el("tbody", {}, rows));
}

function matrixRow(evaluation, counts, row) {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const truth = evaluation.classes[row];
  return counts.map((count, column) => {
    const share = count / total;
    const label = `${truth} predicted as ${evaluation.classes[column]}: ${count}, ${formatShare(share, 1)} of ${truth}`;
    const cell = el("button", { type: "button", tabindex: "-1", "aria-label": label, title: label, "data-row": row,
      "data-column": column, class: `${row === column ? "right" : "wrong"}${share > 0.7 ? " strong" : ""}`,
      onclick: () => openCell(evaluation, evaluation.references[row], evaluation.references[column], count) },
    counts.length <= 30 && count ? count.toLocaleString("en") : "");
    // The root makes small shares visible. A property is set because the policy of the page forbids style attributes.
    cell.style.setProperty("--share", `${count ? 6 + 94 * Math.sqrt(share) : 0}%`);
    return cell;
  });
}

function moveFocus(event, cells) {
  const { row, column } = event.target.dataset;
  const last = cells.length - 1;
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -last],
    End: [0, last] };
  if (row === undefined || !(event.key in moves)) return;
  const [down, right] = moves[event.key];
  const within = (place) => Math.min(last, Math.max(0, place));
  cells[within(Number(row) + down)][within(Number(column) + right)].focus();
  event.preventDefault();
}

/** Makes the focused cell the one to which Tab returns. */
function markTabStop(target, cells) {
  for (const cell of cells.flat()) if (cell.tabIndex === 0) cell.tabIndex = -1;
  target.tabIndex = 0;
}

/** Returns the list of the most confused pairs, each a button that opens its mistakes. */
function pairList(evaluation) {
  const most = evaluation.pairs[0][2];
  return el("ol", { class: "pairs" }, evaluation.pairs.map(([label, prediction, count]) => {
    const bar = el("i", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * count) / most}%`;
    return el("li", {}, el("button", { type: "button", onclick: () => openCell(evaluation, label, prediction, count) },
      pairOfNames(evaluation, label, prediction), el("b", {}, String(count)), bar));
  }));
}
