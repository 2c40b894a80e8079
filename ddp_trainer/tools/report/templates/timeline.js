// The time of a step by phase, over the steps of one run.

const PHASES = {
  "time/data_wait_ms": { name: "waiting for data", style: "phase-data" },
  "time/forward_backward_ms": { name: "forward and backward", style: "phase-compute" },
  "time/communication_ms": { name: "gradient synchronisation", style: "phase-communication" },
  "time/optimizer_ms": { name: "optimizer", style: "phase-optimizer" },
  "time/other_ms": { name: "between steps", style: "phase-other" },
};
const MAX_STAIRS = 2000;

function phasesOf(run) {
  return Object.keys(PHASES).filter((tag) => run.series.has(tag));
}

/** A stacked area for each phase; the highest sum is drawn first, and the lower ones over it. */
class TimelineChart extends Chart {
  constructor(parent) {
    super("Time of a step by phase", parent);
    this.run = null;
    this.isShare = false;
  }

  markedRuns() {
    return [this.run];
  }

  content() {
    const { run, isShare } = this;
    const tags = phasesOf(run);
    const tables = tags.map((tag) => windowsOf(run, tag));
    const { x } = tables[0];
    const sums = [];
    for (const { values } of tables) {
      const below = sums.at(-1);
      sums.push(values.map((value, i) => (value === null ? null : value + (below?.[i] ?? 0))));
    }
    const total = sums.at(-1);
    const share = (value, i) => (value === null ? null : value / (total[i] || 1));
    const tops = isShare ? sums.map((sum) => sum.map(share)) : sums;
    const order = tags.map((_, i) => i).reverse();
    const paths = x.length <= MAX_STAIRS ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear();
    this.setLegend(tags.map((tag, i) => ({
      style: PHASES[tag].style,
      name: PHASES[tag].name,
      series: 1 + order.indexOf(i),
      text: (_, index) => {
        const value = tables[i].values[index];
        return value === null ? "—" : `${formatNumber(value)} ms (${formatShare(value / (total[index] || 1), 0)})`;
      },
    })));
    return {
      axis: { format: (value) => (isShare ? formatShare(value, 0) : `${formatNumber(value)} ms`),
        scale: { range: (plot, low, high) => [0, isShare ? 1 : (high || 1) * 1.05] } },
      series: order.map((i) => {
        const name = PHASES[tags[i]].style;
        return { fill: () => colour(name), width: 0, paths, points: { show: false } };
      }),
      values: [x, ...order.map((i) => tops[i])],
    };
  }
}

/** Returns { x, values } of a phase. A record covers the steps before it, so the area of the first begins there. */
function windowsOf(run, tag) {
  const { table, values: column } = run.series.get(tag);
  const { x, rows } = axisOf(run, table, view.mode);
  const values = rows ? Array.from(rows, (row) => (row < 0 ? null : column[row])) : column;
  const step = run.series.get("time/step_ms")?.values[0] ?? 0;
  const start = view.mode === "time" ? Math.max(0, x[0] - (step * table.steps[0]) / 1000) : 0;
  return x.length && start < x[0] ? { x: [start, ...x], values: [values[0], ...values] } : { x, values };
}

function startTimeline() {
  const timed = runs.filter((run) => phasesOf(run).length);
  if (!timed.length) return;
  const host = document.getElementById("timeline");
  const select = el("select", { "aria-label": "Run", onchange: () => show() },
    timed.map((run) => el("option", { value: run.place }, run.name)));
  const share = el("input", { type: "checkbox", onchange: () => show() });
  host.replaceChildren(el("div", { class: "toolbar" },
    timed.length > 1 ? el("label", { class: "control" }, "Run ", select) : null,
    el("label", { class: "control" }, share, " Share of the step"),
    resetButton()));
  const chart = new TimelineChart(host);
  const show = () => {
    chart.run = runs[Number(select.value)];
    chart.isShare = share.checked;
    chart.draw();
  };
  chart.run = timed[0];
}
