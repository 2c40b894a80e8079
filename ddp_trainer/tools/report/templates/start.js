// The start of the page. window.__report is for tests: the charts, and the time until they were on the screen.

const began = performance.now();
startTheme();
startDialog();
startCharts();
startTimeline();
startLanes();
charts.forEach((chart) => chart.draw());
startEvaluations();
themeListeners.push(() => charts.forEach((chart) => chart.plot?.redraw(false)));
new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(document.getElementById("main"));
// The browser has scrolled to the section in the address before the charts took their room.
document.getElementById(location.hash.slice(1))?.scrollIntoView({ behavior: "instant" });
requestAnimationFrame(() => setTimeout(() => { // a task after the next frame
  window.__report = { charts, view, milliseconds: performance.now() - began };
}));
