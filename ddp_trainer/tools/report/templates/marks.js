// The marks of charts: resumes with their world sizes, the time between launches, divergence.

function visibleRuns() {
  return runs.filter((run) => !view.hidden.has(run.place));
}

/** Shades the time between the launches of each of the `shown` runs, below the curves. */
function drawGaps({ ctx, bbox, valToPos }, shown) {
  if (view.mode !== "time") return;
  ctx.save();
  ctx.globalAlpha = 0.1;
  for (const run of shown) {
    ctx.fillStyle = colour(runStyle(run.place).name);
    for (const { gap, time } of run.launches) {
      if (gap === null || time === null) continue;
      const left = Math.max(bbox.left, valToPos(gap, "x", true));
      const right = Math.min(bbox.left + bbox.width, valToPos(time, "x", true));
      if (right > left) ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
  }
  ctx.restore();
}

/** Returns the marks of the `shown` runs from left to right: { x, labels, colour, dash }, labels from long to short. */
function marksOf(shown) {
  const marks = [];
  for (const run of shown) {
    for (const launch of run.launches) {
      const name = launch.step > 0 ? "resumed" : "restarted";
      const ranks = launch.ranks ? plural(launch.ranks, "rank") : "";
      const labels = ranks ? [`${name}, ${ranks}`, ranks] : [name];
      marks.push({ x: position(run, launch, view.mode), labels, colour: runStyle(run.place).name, dash: [5, 4] });
    }
    if (run.nonfinite) {
      marks.push({ x: position(run, run.nonfinite, view.mode), labels: ["not finite"], colour: "error", dash: [] });
    }
  }
  return marks.filter(({ x }) => x !== null).sort((a, b) => a.x - b.x);
}

/** Draws a line at each mark of the `shown` runs, and above the plot the longest of its labels that has room. */
function drawMarks(plot, shown) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  Object.assign(ctx, { font: `${11 * ratio}px system-ui, sans-serif`, textBaseline: "bottom", textAlign: "left" });
  ctx.lineWidth = 1.5 * ratio;
  let free = 0;
  for (const mark of marksOf(shown)) {
    const x = plot.valToPos(mark.x, "x", true);
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = colour(mark.colour);
    ctx.fillStyle = colour(mark.colour);
    ctx.setLineDash(mark.dash.map((part) => part * ratio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    for (const label of mark.labels) {
      const width = ctx.measureText(label).width;
      const left = Math.min(x - 2 * ratio, bbox.left + bbox.width - width);
      if (left < free) continue;
      ctx.fillText(label, left, bbox.top - 2 * ratio);
      free = left + width + 8 * ratio;
      break;
    }
  }
  ctx.restore();
}
