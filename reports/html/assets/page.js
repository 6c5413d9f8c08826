// Draws the charts once the page is loaded.

const kinds = { lines, strip, lanes, grid };
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  figure.classList.add("live");
  try {
    kinds[figure.dataset.chart](figure, spec);
  } catch (error) {
    // A chart that fails leaves its table.
    figure.classList.remove("live");
    figure.querySelector("details").open = true;
    console.error(error);
  }
}

const redraw = (width) => plots.forEach((plot) => plot.draw(width));
new ResizeObserver(() => {
  if (document.body.classList.contains("paper")) return;
  for (const plot of plots) {
    const width = plot.holder.clientWidth;
    if (width && width !== plot.width) plot.draw(width);
  }
}).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
// Print is always light, and about this wide.
addEventListener("beforeprint", () => {
  document.body.classList.add("paper");
  redraw(660);
});
addEventListener("afterprint", () => {
  document.body.classList.remove("paper");
  redraw();
});
document.documentElement.classList.add("ready");
