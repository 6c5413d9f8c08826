// Shared by charts with one row for each rank: labels, row heights, and the row under the cursor.

const rowHeight = (rows) => Math.max(10, Math.min(26, Math.round(560 / rows)));

const rowChart = (rows, range, xLabel, xValues, paint) => {
  const tall = rowHeight(rows.length);
  const every = Math.ceil(13 / tall);
  const longest = Math.max(...rows.map((row) => row.label.length));
  return {
    height: rows.length * tall + 56,
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { show: false } },
    scales: { x: { time: false, range: (u, min, max) => clamp(min, max, range) }, y: { range: [0, rows.length], dir: -1 } },
    series: [{}, { paths: () => null, points: { show: false } }],
    axes: [
      axis({ label: xLabel, labelSize: 18, size: 34, values: xValues }),
      axis({
        size: 18 + longest * 7,
        grid: { show: false },
        splits: () => rows.map((_, number) => number + 0.5).filter((_, number) => number % every === 0),
        values: (u, splits) => splits.map((at) => rows[Math.floor(at)]?.label ?? ""),
      }),
    ],
    hooks: { draw: [(u) => clipped(u, () => paint(u))] },
  };
};

// The pages of a chart, if there are several.
const choosing = (figure, show) => {
  const chooser = figure.querySelector("select");
  chooser?.addEventListener("change", () => show(chooser.selectedIndex));
};

const clamp = (min, max, [first, last]) =>
  min === null || min === max ? [first, last] : [Math.max(first, min), Math.min(last, max)];

const clipped = (u, paint) => {
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
  paint();
  u.ctx.restore();
};

// A bar in a row; `share` of the row's height, so that kinds differ in shape and not in colour alone.
const bar = (u, row, from, to, fill, share) => {
  const left = u.valToPos(from, "x", true);
  const right = u.valToPos(to, "x", true);
  const top = u.valToPos(row, "y", true);
  const bottom = u.valToPos(row + 1, "y", true);
  const room = bottom - top;
  const tall = Math.max(1, room * share);
  u.ctx.fillStyle = fill;
  u.ctx.fillRect(left, top + (room - tall) / 2, Math.max(1, right - left), tall);
};

const rowAt = (u, top, rows) => Math.min(rows.length - 1, Math.max(0, Math.floor(u.posToVal(top, "y"))));
