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
// A link to a folded section opens it.
const unfold = () => {
  const folded = document.getElementById(location.hash.slice(1))?.closest("details");
  if (folded) folded.open = true;
};
addEventListener("hashchange", unfold);
document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", () => setTimeout(unfold)));
unfold();

// Print is always light, about this wide, and shows what is folded, except the tables behind charts.
let unfolded = [];
addEventListener("beforeprint", () => {
  document.body.classList.add("paper");
  unfolded = [...document.querySelectorAll("details:not([open])")].filter((one) => !one.closest("figure"));
  unfolded.forEach((one) => (one.open = true));
  redraw(660);
});
addEventListener("afterprint", () => {
  document.body.classList.remove("paper");
  unfolded.forEach((one) => (one.open = false));
  redraw();
});
document.documentElement.classList.add("ready");
