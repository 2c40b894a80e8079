// The own time of each rank as a lane: a cell is darker the slower the rank was than the median of these ranks.

const FULL_COLOUR = 0.3;
const LANE_WIDTH = 900;

/** Returns the median of numbers, without nulls; null if there are none. */
function middleOf(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!known.length) return null;
  const half = known.length >> 1;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

/** Draws one block of lanes, and describes the cell under the pointer or the cell that the arrow keys selected. */
class LaneChart {
  constructor(parent) {
    this.canvas = el("canvas", { class: "lanes", tabindex: "0", role: "img",
      onpointermove: (event) => this.point(event), onpointerleave: () => this.mark(null),
      onkeydown: (event) => this.move(event) });
    this.text = el("p", { class: "muted lane-text", "aria-live": "polite" });
    parent.append(this.canvas, this.text);
    this.cell = null;
    themeListeners.push(() => this.draw());
  }

  show(lanes) {
    this.lanes = lanes;
    this.middles = lanes.steps.map((_, column) => middleOf(lanes.own.map((lane) => lane[column])));
    const count = lanes.ranks.length;
    this.height = Math.max(3, Math.min(22, Math.floor(360 / count)));
    this.canvas.setAttribute("aria-label", `Own time of ${plural(count, "rank")}: ${lanes.title}`);
    this.mark(null);
  }

  draw() {
    const { canvas, lanes, height } = this;
    if (!lanes) return;
    const scale = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [LANE_WIDTH * scale, lanes.ranks.length * height * scale];
    canvas.style.setProperty("--lanes-height", `${lanes.ranks.length * height}px`);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const width = LANE_WIDTH / lanes.steps.length;
    lanes.own.forEach((lane, row) => lane.forEach((value, column) => {
      if (value === null) return;
      const share = Math.max(0, Math.min(1, (value / this.middles[column] - 1) / FULL_COLOUR));
      for (const [name, alpha] of [["grid", 1], ["wrong", share]]) {
        context.globalAlpha = alpha;
        context.fillStyle = colour(name);
        context.fillRect(column * width, row * height, width + 0.5, height - (height > 5 ? 1 : 0));
      }
    }));
    context.globalAlpha = 1;
    if (!this.cell) return;
    context.strokeStyle = colour("text");
    context.lineWidth = 2;
    context.strokeRect(this.cell.column * width, this.cell.row * height, Math.max(width, 3), height - 1);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const { ranks, steps } = this.lanes;
    const within = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
    this.mark({ column: within((event.clientX - box.left) / box.width, steps.length),
      row: within((event.clientY - box.top) / box.height, ranks.length) });
  }

  move(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves)) return;
    const { ranks, steps } = this.lanes;
    const { row, column } = this.cell ?? { row: 0, column: 0 };
    const [down, right] = this.cell ? moves[event.key] : [0, 0];
    this.mark({ row: Math.max(0, Math.min(ranks.length - 1, row + down)),
      column: Math.max(0, Math.min(steps.length - 1, column + right)) });
    event.preventDefault();
  }

  mark(cell) {
    this.cell = cell;
    this.text.textContent = cell ? this.describe(cell) : "A cell is orange where a rank was slower than the median of "
      + "the ranks shown, fully so from 30 % on. Point at one, or use the arrow keys.";
    this.draw();
  }

  describe({ row, column }) {
    const { ranks, steps, own, worst } = this.lanes;
    const value = own[row][column];
    const place = `Rank ${ranks[row]}, up to step ${formatNumber(steps[column])}`;
    if (value === null) return `${place}: not known`;
    const slower = value / this.middles[column] - 1;
    const found = worst[column] ? `; slowest was rank ${ranks[worst[column][0]]}, in ${worst[column][1]}` : "";
    const word = slower < 0 ? "faster" : "slower";
    return `${place}: ${formatNumber(value)} ms a step, ${formatShare(Math.abs(slower), 0)} ${word} than the median${found}`;
  }
}

function startLanes() {
  const host = document.getElementById("lanes");
  const choices = data.runs.flatMap((run) => run.lanes.map((lanes) => ({ name: run.name, lanes })));
  if (!choices.length) return;
  const name = (choice) => (data.runs.length > 1 ? `${choice.name}: ${choice.lanes.title}` : choice.lanes.title);
  const select = el("select", { "aria-label": "Lanes", onchange: () => chart.show(choices[Number(select.value)].lanes) },
    choices.map((choice, place) => el("option", { value: place }, name(choice))));
  host.replaceChildren(el("div", { class: "toolbar" },
    choices.length > 1 ? el("label", { class: "control" }, "Steps ", select) : muted(name(choices[0]))));
  const chart = new LaneChart(host);
  chart.show(choices[0].lanes);
}
