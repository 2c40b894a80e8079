// The settings of the curves, and the start of their charts.

function redraw(some = charts) {
  for (const chart of some) chart.draw();
}

function toolbar() {
  const log = el("input", { type: "checkbox", onchange: () => {
    view.isLog = log.checked;
    redraw(charts.filter((chart) => chart.isLoss));
  } });
  return [
    el("fieldset", { class: "segments" }, el("legend", {}, "x axis"), Object.keys(MODES).map(modeButton)),
    smoothingSlider(),
    el("label", { class: "control" }, log, " Log scale of the loss"),
    runs.length > 1 ? el("fieldset", { class: "control runs" }, el("legend", {}, "Runs"), runs.map(runToggle)) : null,
    resetButton(),
  ].filter(Boolean);
}

function modeButton(mode) {
  const state = { checked: mode === view.mode, disabled: mode === "epoch" && !runs.some((run) => run.stepsPerEpoch) };
  const change = () => {
    view.mode = mode;
    zoomTo(null);
    redraw();
  };
  const input = el("input", { type: "radio", name: "mode", value: mode, ...state, onchange: change });
  return el("label", {}, input, el("span", {}, MODES[mode]));
}

function smoothingSlider() {
  const weight = el("output", {});
  const setWeight = () => {
    view.smoothing = slider.value > 0 ? 1 - 10 ** (-slider.value / 33.3) : 0;
    weight.textContent = view.smoothing ? view.smoothing.toFixed(3) : "off";
  };
  const slider = el("input", { type: "range", min: 0, max: 100, value: defaultSmoothing(),
    "aria-label": "Smoothing of the training curves", oninput: () => {
      setWeight();
      redraw(charts.filter((chart) => chart.isTraining));
    } });
  setWeight();
  return el("label", { class: "control" }, "Smoothing ", slider, weight);
}

/** Returns where the slider is at first: long curves are smoothed, because their noise hides the other runs. */
function defaultSmoothing() {
  const longest = Math.max(...runs.map((run) => run.series.get("train/loss")?.values.length ?? 0));
  return longest > 500 ? 50 : 0;
}

function runToggle(run) {
  const input = el("input", { type: "checkbox", checked: true, onchange: () => {
    if (input.checked) view.hidden.delete(run.place);
    else view.hidden.add(run.place);
    redraw();
  } });
  return el("label", {}, input, swatch(runStyle(run.place).swatch), el("bdi", {}, run.name));
}

/** Makes the charts: the known tags, and the others in a section that is closed at first. */
function startCharts() {
  const tags = new Set(runs.flatMap((run) => [...run.series.keys()]));
  if (!tags.size) return;
  const [host, more] = [document.getElementById("charts"), document.getElementById("more")];
  const bar = document.getElementById("toolbar");
  bar.append(...toolbar());
  bar.hidden = false;
  for (const tag of Object.keys(KNOWN)) if (tags.has(tag)) new CurveChart(tag, host);
  const others = [...tags].filter((tag) => !Object.hasOwn(KNOWN, tag)).sort();
  for (const tag of others) new CurveChart(tag, more.querySelector(".charts"));
  more.hidden = !others.length;
  more.querySelector("summary").textContent = `More curves (${others.length})`;
  more.addEventListener("toggle", () => charts.forEach((chart) => chart.resize()));
}
