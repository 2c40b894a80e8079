// The charts, and the curves of a tag with their legend.

const KNOWN = {
  "train/loss": { title: "Training loss", isLoss: true },
  "eval/loss": { title: "Evaluation loss", isLoss: true },
  "train/top1": { title: "Training top-1", format: formatShare },
  "eval/top1": { title: "Evaluation top-1", format: formatShare },
  "optim/lr": { title: "Learning rate" },
  "throughput/images_per_second": { title: "Throughput", unit: "img/s" },
  "memory/peak_mb": { title: "Peak memory", unit: "MB" },
};
const SECONDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800,
  21600, 43200, 86400, 172800, 432000, 864000, 2592000];
const HEIGHT = 220;
const MAX_SHOWN_POINTS = 40;

/** Returns uPlot's options for a chart, which shares its x axis, zoom and crosshair with all charts. */
function plotOptions(width, series, axis) {
  const font = "11px system-ui, sans-serif";
  const grid = { stroke: () => colour("grid"), width: 1 };
  const style = { stroke: () => colour("muted"), font, ticks: { show: false }, grid };
  const text = (place) => (place === null ? "" : axis.format(place)); // a logarithmic axis has lines without a number
  const [min, max] = view.range ?? fullRange();
  return {
    width,
    height: HEIGHT,
    padding: [marksOf(runs).length ? 18 : 8, null, 0, 0],
    legend: { show: false },
    series: [{}, ...series],
    scales: { x: { time: false, min, max, range: () => view.range ?? fullRange() }, y: axis.scale },
    axes: [
      { ...style, size: 28, space: 60, incrs: incrementsOfX(), values: (plot, places) => places.map(formatX) },
      { ...style, size: axisWidth, values: (plot, places) => places.map(text) },
    ],
    cursor: {
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: false, dist: 4 },
      bind: { dblclick: () => () => zoomTo(null) },
      sync: {
        key: "curves",
        setSeries: false,
        scales: ["x", null],
        filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
      },
    },
    hooks: {
      setSelect: [selectRange],
      ready: [(plot) => followTouch(plot.over)],
    },
  };
}

function incrementsOfX() {
  if (view.mode === "time") return SECONDS;
  const powers = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((part) => part * 10 ** power));
  return view.mode === "step" ? powers : [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, ...powers];
}

/** Returns the width that the numbers of a y axis need. */
function axisWidth(plot, values) {
  const longest = Math.max(0, ...(values ?? []).map((value) => String(value ?? "").length));
  return Math.max(34, 7 * longest + 12);
}

function selectRange(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
}

/** A figure with a title, a legend of the values at the crosshair, and a plot. */
class Chart {
  constructor(title, parent) {
    this.title = title;
    this.at = el("span", { class: "at" });
    this.legend = el("ul", { class: "legend" });
    this.host = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `${title}. Left and right arrow keys move the crosshair, plus and minus zoom, 0 resets.`,
      onkeydown: (event) => this.plot && onChartKey(event, this.plot) });
    this.figure = el("figure", { class: "chart card" },
      el("figcaption", {}, el("strong", {}, title), this.at), this.legend, this.host);
    parent.append(this.figure);
    this.plot = null;
    this.items = [];
    charts.push(this);
  }

  /** Draws the plot again; a chart in a closed section is drawn when the section is opened. */
  draw() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.width();
    if (!width) return;
    const { series, axis, values } = this.content();
    const options = plotOptions(width, series, axis);
    Object.assign(options.hooks, {
      drawAxes: [(plot) => drawGaps(plot, this.markedRuns())],
      draw: [(plot) => drawMarks(plot, this.markedRuns())],
      setCursor: [() => this.showValues()],
    });
    this.plot = new uPlot(options, values, this.host);
    this.showValues();
  }

  /** Returns the width for the plot; 0 in a closed section, although the browser gives it a width. */
  width() {
    return this.host.closest("details:not([open])") ? 0 : this.host.clientWidth;
  }

  markedRuns() {
    return visibleRuns();
  }

  resize() {
    const width = this.width();
    if (!width) return;
    if (!this.plot) this.draw();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Makes the legend: for each item the swatch, the name and the text of its value at an index of the data. */
  setLegend(items) {
    this.items = items.map((item) => ({ ...item, node: el("b", {}) }));
    this.legend.replaceChildren(...this.items.map(({ style, name, node }) =>
      el("li", {}, style ? swatch(style) : null, name ? el("bdi", {}, name) : null, node)));
  }

  /** Shows the values at the crosshair; without a crosshair, the last values. */
  showValues() {
    const { plot } = this;
    if (!plot) return;
    const isMoving = plot.cursor.left >= 0 && plot.cursor.idx !== null && plot.cursor.idx !== undefined;
    const x = isMoving && formatX(plot.data[0][plot.cursor.idx]);
    this.at.textContent = isMoving ? `${MODES[view.mode].toLowerCase()} ${x}` : "last values";
    for (const { series, text, node } of this.items) {
      const column = plot.data[series];
      const index = isMoving ? plot.cursor.idxs[series] : lastIndex(column);
      node.textContent = index === null || index === undefined ? "—" : text(plot.data, index);
    }
  }
}

function lastIndex(column) {
  for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return i;
  return null;
}

/** A chart of one tag, with a curve for each run; if it is smoothed, a fainter curve shows the recorded values. */
class CurveChart extends Chart {
  constructor(tag, parent) {
    const { title = tag, unit = "", format = formatNumber, isLoss = false } = KNOWN[tag] ?? {};
    super(unit ? `${title} (${unit})` : title, parent);
    Object.assign(this, { tag, format, isLoss, isTraining: tag.startsWith("train/") });
  }

  content() {
    const shown = runsWith(this.tag);
    const isLog = this.isLoss && view.isLog;
    const weight = this.isTraining ? view.smoothing : 0;
    const recorded = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    const { x, columns } = valuesOf(this.tag, shown, view.mode, recorded);
    const average = (values) => smooth(recorded(values), weight);
    const smoothed = weight ? valuesOf(this.tag, shown, view.mode, average).columns : [];
    const hasPoints = x.length <= MAX_SHOWN_POINTS;
    this.setLegend(shown.map((run, i) => this.legendItem(run, i, smoothed.length)));
    return {
      axis: this.axis(isLog),
      series: [
        ...shown.map((run) => this.line(run, { isFaint: Boolean(weight), hasPoints })),
        ...smoothed.map((_, i) => this.line(shown[i], { isFaint: false, hasPoints })),
      ],
      values: [x, ...columns, ...smoothed],
    };
  }

  legendItem(run, i, numSmoothed) {
    const text = (columns, index) => {
      const value = this.format(columns[1 + i][index]);
      return numSmoothed ? `${this.format(columns[1 + numSmoothed + i][index])} (raw ${value})` : value;
    };
    return { style: runStyle(run.place).swatch, name: runs.length > 1 ? run.name : "", series: 1 + i, text };
  }

  line(run, { isFaint, hasPoints }) {
    const { name, dash } = runStyle(run.place);
    const stroke = () => colour(name);
    const points = { show: hasPoints && !isFaint, size: 5, fill: stroke };
    const strength = isFaint ? { width: 1, alpha: 0.3 } : { width: 1.75 };
    return { stroke, dash, points, ...strength, show: !view.hidden.has(run.place) };
  }

  axis(isLog) {
    if (isLog) return { format: this.format, scale: { distr: 3 } };
    if (this.format !== formatShare) return { format: this.format, scale: {} };
    return { format: (value) => `${Number((100 * value).toFixed(2))} %`, scale: { range: shareRange } };
  }
}

/** Returns the range of an axis of shares, which are 0 to 1. */
function shareRange(plot, low, high) {
  if (low === null) return [0, 1];
  const pad = Math.max(0.01, (high - low) * 0.08);
  return [Math.max(0, low - pad), Math.min(1, high + pad)];
}
