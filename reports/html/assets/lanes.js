// A timeline: one row a rank (or a host), bars from one moment to another.

const lanes = (figure, spec) => {
  let at = 0;
  const windows = spec.windows;
  const make = () => {
    const { spans } = windows[at];
    const rows = (windows[at].rows ?? spec.rows).map((label) => ({ label }));
    const range = [Math.min(0, ...spans.map((span) => span[1])), Math.max(...spans.map((span) => span[2]))];
    const paint = (u) => {
      for (const [row, from, to, kind] of spans) {
        bar(u, row, from, to, colour(spec.kinds[kind].colour), spec.kinds[kind].share);
      }
    };
    const options = rowChart(rows, range, spec.unit, (u, splits) => splits.map(short), paint);
    const read = (u, left, top) => {
      const moment = u.posToVal(left, "x");
      const row = rowAt(u, top, rows);
      // What is drawn last lies on top.
      const found = spans.findLast((span) => span[0] === row && span[1] <= moment && moment <= span[2]);
      const where = `${rows[row].label} at ${short(moment)} ${spec.unit}`;
      if (!found) return `${where}: nothing`;
      const what = found[4] ? `, ${found[4]}` : "";
      return `${where}: ${spec.kinds[found[3]].label}${what}, ${short(found[2] - found[1])} ${spec.unit}`;
    };
    return { options, data: [range, [null, null]], read, down: rowHeight(rows.length) };
  };
  const plot = addPlot(figure, make);
  choosing(figure, (chosen) => {
    at = chosen;
    plot.draw();
  });
};
