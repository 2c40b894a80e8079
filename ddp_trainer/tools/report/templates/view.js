// What all charts show together: the x axis, its zoomed part and the crosshair, by mouse, finger and keys.

const MODES = { step: "Step", epoch: "Epoch", time: "Time" };

/** What all charts show: x axis, zoomed part of it, smoothing, scale of the loss, hidden runs. */
const view = { mode: "step", range: null, smoothing: 0, isLog: false, hidden: new Set() };
const charts = [];

/** Returns the whole x axis in the present mode: from 0 to the last record of any run. */
function fullRange() {
  let high = 0;
  for (const run of runs) {
    for (const { table } of run.series.values()) {
      const end = view.mode === "time" ? table.times : table.steps;
      const last = position(run, { step: end.at(-1), time: end.at(-1) }, view.mode);
      high = Math.max(high, last ?? 0);
    }
  }
  return [0, high || 1];
}

/** Returns the runs that have a tag and a place on the present x axis. */
function runsWith(tag) {
  return runs.filter((run) => run.series.has(tag) && (view.mode !== "epoch" || run.stepsPerEpoch));
}

/** Returns a value of the x axis as text. */
function formatX(value) {
  if (view.mode === "time") return formatSeconds(value);
  return view.mode === "step" ? formatNumber(Math.round(value)) : String(Number(value.toFixed(2)));
}

// --- zoom ---

/** Shows a part [low, high] of the x axis in all charts; null shows all of it. */
function zoomTo(range) {
  view.range = range;
  const [min, max] = range ?? fullRange();
  for (const chart of charts) chart.plot?.setScale("x", { min, max });
  for (const button of document.querySelectorAll(".reset")) button.disabled = !range;
}

/** Returns a button that shows all of the x axis again. */
function resetButton() {
  return el("button", { type: "button", class: "button reset", disabled: true, onclick: () => zoomTo(null) },
    "Reset zoom");
}

/** Zooms by a factor around a place on the x axis. */
function zoomBy(factor, middle) {
  const [low, high] = view.range ?? fullRange();
  const [first, last] = fullRange();
  const range = [Math.max(first, middle - (middle - low) * factor), Math.min(last, middle + (high - middle) * factor)];
  zoomTo(range[0] <= first && range[1] >= last ? null : range);
}

/** Moves the crosshair with the arrow keys, zooms with + and -, resets with 0. */
function onChartKey(event, plot) {
  const [x] = plot.data;
  const [first, last] = plot.series[0].idxs;
  const at = plot.cursor.left >= 0 ? plot.cursor.idx : (first + last) >> 1;
  const stride = Math.max(1, Math.round((last - first) / 100));
  const moves = { ArrowLeft: -stride, ArrowRight: stride, PageUp: -10 * stride, PageDown: 10 * stride };
  if (event.key in moves) {
    const place = Math.min(last, Math.max(first, at + moves[event.key]));
    plot.setCursor({ left: plot.valToPos(x[place], "x"), top: 1 }, true, true);
  } else if (event.key === "+" || event.key === "-") {
    zoomBy(event.key === "+" ? 0.5 : 2, x[at]);
  } else if (event.key === "0") {
    zoomTo(null);
  } else {
    return;
  }
  event.preventDefault();
}

/** Turns a horizontal movement of a finger into mouse events, because uPlot handles no others. */
function followTouch(over) {
  const send = (type, target) => (event) => {
    if (event.pointerType !== "touch") return;
    const { clientX, clientY } = event;
    target.dispatchEvent(new MouseEvent(type, { clientX, clientY, movementX: 1, button: 0, bubbles: true }));
  };
  over.addEventListener("pointerdown", send("mousedown", over));
  over.addEventListener("pointermove", send("mousemove", over));
  over.addEventListener("pointerup", send("mouseup", document));
  over.addEventListener("pointercancel", send("mouseup", document));
}
