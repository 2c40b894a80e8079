// Shows the mistakes of one cell of a confusion matrix, or of one pair of classes.

function showMistakes(evaluation, { label, prediction }) {
  const figures = [...evaluation.querySelectorAll(".mistake")];
  const isShown = ({ dataset }) =>
    label === undefined || (dataset.label === label && dataset.prediction === prediction);
  for (const figure of figures) figure.hidden = !isShown(figure);

  const button = evaluation.querySelector(".all");
  if (!button) return;
  button.hidden = label === undefined;
  const count = figures.filter(isShown).length;
  evaluation.querySelector(".shown").textContent =
    label === undefined
      ? "The largest loss is first."
      : `${label} predicted as ${prediction}: ${count} in this report.`;
  evaluation.querySelector(".mistakes").scrollTop = 0;
  button.parentElement.scrollIntoView({ block: "start" });
  (button.hidden ? evaluation.querySelector(".mistakes") : button).focus({ preventScroll: true });
}

for (const evaluation of document.querySelectorAll(".evaluation")) {
  evaluation.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-label]");
    if (!link && !event.target.matches(".all")) return;
    event.preventDefault();
    showMistakes(evaluation, link ? link.dataset : {});
  });
}
