// Colours come from the style sheet, so that charts follow light, dark and print.

const colour = (name) => getComputedStyle(document.body).getPropertyValue("--" + name).trim();
const LINES = 8;
const lineColour = (number) => colour("line-" + ((number % LINES) + 1));
// Colours repeat after eight; dashes then distinguish the lines.
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const lineDash = (number) => DASHES[Math.floor(number / LINES) % DASHES.length];

const axis = (more) => ({
  stroke: colour("quiet"),
  grid: { stroke: colour("rule"), width: 1 },
  ticks: { stroke: colour("rule"), width: 1 },
  font: "12px system-ui, sans-serif",
  labelFont: "12px system-ui, sans-serif",
  ...more,
});
