// The records of the runs as arrays, and their values on a common x axis.

/** Returns the running sums of an array of differences. */
function cumulative(differences, scale = 1) {
  const sums = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < sums.length; i++) {
    sum += differences[i];
    sums[i] = sum / scale;
  }
  return sums;
}

let numTables = 0;

function decodeRun(run, place) {
  const series = new Map();
  for (const { steps, times, columns } of run.tables) {
    const table = { id: numTables++, steps: cumulative(steps), times: cumulative(times, 100), axes: {} };
    for (const [tag, values] of Object.entries(columns)) series.set(tag, { table, values });
  }
  const seconds = (ticks) => (ticks === null ? null : ticks / 100);
  const launches = run.launches
    .map(({ step, ranks, time, gap }, number) => ({ step, ranks, number, time: seconds(time), gap: seconds(gap) }))
    .filter(({ step, number }) => step > 0 || number > 0);
  const nonfinite = run.nonfinite && { step: run.nonfinite.step, time: seconds(run.nonfinite.time) };
  return { name: run.name, place, stepsPerEpoch: run.stepsPerEpoch, series, launches, nonfinite };
}

const runs = data.runs.map(decodeRun);

/** Returns the place of a moment { step, time } of a run on the x axis; null where it is unknown. */
function position(run, moment, mode) {
  if (mode === "time") return moment.time;
  return mode === "epoch" ? run.stepsPerEpoch && moment.step / run.stepsPerEpoch : moment.step;
}

/** Returns { x, rows } of a table: sorted places on the x axis and the row of each, -1 for a break of the line. */
function axisOf(run, table, mode) {
  table.axes[mode] ??= mode === "time" ? timeAxis(run, table.times) : {
    x: mode === "step" ? table.steps : table.steps.map((step) => step / run.stepsPerEpoch),
    rows: null,
  };
  return table.axes[mode];
}

function timeAxis(run, times) {
  const order = [...times.keys()];
  if (times.some((time, i) => i > 0 && time < times[i - 1])) order.sort((a, b) => times[a] - times[b]);
  const gaps = run.launches.filter(({ gap, time }) => gap !== null && time !== null);
  const x = [];
  const rows = [];
  for (const row of order) {
    if (x.length && gaps.length && rows.at(-1) >= 0) {
      const before = x.at(-1);
      const crossed = gaps.find(({ gap, time }) => before <= gap + 0.01 && times[row] >= time - 0.01);
      if (crossed) {
        x.push(before + Math.min(0.001, (times[row] - before) / 2));
        rows.push(-1);
      }
    }
    x.push(times[row]);
    rows.push(row);
  }
  return { x: Float64Array.from(x), rows: Int32Array.from(rows) };
}

/** Returns { x, places }: the union of sorted arrays, and the places of each array's elements in it. */
function merge(arrays) {
  const [first] = arrays;
  if (arrays.every((array) => array.length === first.length && array.every((value, i) => value === first[i]))) {
    return { x: first, places: arrays.map(() => null) };
  }
  const places = arrays.map((array) => new Int32Array(array.length));
  const next = arrays.map(() => 0);
  const x = [];
  for (;;) {
    let low = Infinity;
    arrays.forEach((array, i) => { if (array[next[i]] < low) low = array[next[i]]; });
    if (low === Infinity) return { x: Float64Array.from(x), places };
    arrays.forEach((array, i) => { if (array[next[i]] === low) places[i][next[i]++] = x.length; });
    x.push(low);
  }
}

const merged = new Map();

/** Returns { x, columns } of the values of a tag: one column for each run that has it, in the order of `shown`. */
function valuesOf(tag, shown, mode, transform = (values) => values) {
  const axes = shown.map((run) => axisOf(run, run.series.get(tag).table, mode));
  const key = [mode, ...shown.map((run) => run.series.get(tag).table.id)].join(" ");
  if (!merged.has(key)) merged.set(key, merge(axes.map((axis) => axis.x)));
  const { x, places } = merged.get(key);
  const columns = shown.map((run, i) => {
    const { rows } = axes[i];
    const values = transform(run.series.get(tag).values);
    const own = rows ? Array.from(rows, (row) => (row < 0 ? null : values[row])) : values;
    return places[i] ? scatter(own, places[i], x.length) : own;
  });
  return { x, columns };
}

/** Returns an array with `values` at `places`. Elsewhere it is undefined, which a line crosses, or null for a gap. */
function scatter(values, places, length) {
  const column = new Array(length).fill(undefined);
  for (let i = 0; i < places.length; i++) {
    if (values[i] === null) column.fill(null, places[i], places[i + 1] ?? length);
    else column[places[i]] = values[i];
  }
  return column;
}

/** Returns the exponential moving average of `values` without the bias of its start. Nulls stay. */
function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
