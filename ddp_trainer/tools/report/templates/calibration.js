// The reliability diagram of an evaluation: accuracy over confidence, and below it the images in each bin.

const DIAGRAM = { side: 260, left: 44, top: 10, gap: 46, low: 56 };

function calibrationPart(evaluation) {
  const { calibration: bins, calibration_error: error } = evaluation;
  const title = el("h3", {}, "Calibration");
  if (!bins.some(([, , count]) => count)) return [title, empty("metrics.json has no calibration.")];
  return [title,
    muted(`Expected calibration error ${formatShare(error)}. Bars show the accuracy of the images in a bin of`,
      " confidence, and the orange part shows the difference to their mean confidence. The dashed line is a perfect",
      " calibration."),
    reliabilityDiagram(bins, error), calibrationTable(bins)];
}

/** Returns the diagram. bins: confidence, accuracy and count of each bin. */
function reliabilityDiagram(bins, error) {
  const { side, left, top, gap, low } = DIAGRAM;
  const base = top + side + gap + low;
  const [x, y] = [(value) => left + value * side, (value) => top + (1 - value) * side];
  const text = (content, place) => svg("text", place, content);
  const ticks = [0, 0.25, 0.5, 0.75, 1].flatMap((tick) => [
    svg("line", { class: "grid", x1: x(0), x2: x(1), y1: y(tick), y2: y(tick) }),
    text(`${100 * tick} %`, { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }),
    text(`${100 * tick} %`, { x: x(tick), y: base + 16, "text-anchor": "middle" }),
  ]);
  const most = Math.max(...bins.map(([, , count]) => count ?? 0));
  const columns = bins.map(([confidence, accuracy, count], i) => {
    if (!count || accuracy === null) return null;
    const [below, above] = [accuracy, confidence ?? accuracy].sort((a, b) => a - b);
    const column = { x: x(i / bins.length) + 1, width: side / bins.length - 2 };
    const bar = (kind, bottom, height) => svg("rect", { class: kind, ...column, y: bottom - height, height });
    const shares = `confidence ${formatShare(confidence, 1)}, accuracy ${formatShare(accuracy, 1)}`;
    return svg("g", {},
      svg("title", {}, `${shares}, ${plural(count, "image")}`),
      bar("accuracy", y(0), side * accuracy),
      bar("gap", y(below), side * (above - below)),
      bar("count", base, (low * count) / most));
  });
  return svg("svg", { viewBox: `0 0 ${left + side + 22} ${base + 34}`, class: "reliability", role: "img",
    "aria-label": `Reliability diagram. Expected calibration error ${formatShare(error)}.` },
  ticks, columns,
  svg("line", { class: "ideal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }),
  svg("line", { class: "axis", x1: x(0), x2: x(1), y1: y(0), y2: y(0) }),
  svg("line", { class: "axis", x1: x(0), x2: x(1), y1: base, y2: base }),
  text("accuracy", { x: x(0.03), y: y(0.93) }),
  text(`images in each bin, at most ${formatNumber(most)}`, { x: x(0), y: base - low - 8 }),
  text("confidence", { x: x(0.5), y: base + 31, "text-anchor": "middle" }));
}

function calibrationTable(bins) {
  const heads = ["Bin", "Confidence", "Accuracy", "Images"].map((name) => el("th", { scope: "col" }, name));
  const rows = bins.map(([confidence, accuracy, count], i) => el("tr", {},
    el("th", { scope: "row" }, `${formatShare(i / bins.length, 0)} to ${formatShare((i + 1) / bins.length, 0)}`),
    [formatShare(confidence, 1), formatShare(accuracy, 1), formatNumber(count)].map((value) => el("td", {}, value))));
  return el("details", {}, el("summary", {}, "Values"), el("div", { class: "scroll" },
    el("table", { class: "plain" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))));
}
