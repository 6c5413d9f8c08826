// A timeline: one row for each rank, with a bar for each span.

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
      // The span that is drawn last is on top.
      const span = spans.findLast((one) => one[0] === row && one[1] <= moment && moment <= one[2]);
      const where = `${rows[row].label} at ${short(moment)} ${spec.unit}`;
      if (!span) return `${where}: nothing`;
      const what = span[4] ? `, ${span[4]}` : "";
      return `${where}: ${spec.kinds[span[3]].label}${what}, ${short(span[2] - span[1])} ${spec.unit}`;
    };
    return { options, data: [range, [null, null]], read, down: rowHeight(rows.length) };
  };
  const plot = addPlot(figure, make);
  choosing(figure, (chosen) => {
    at = chosen;
    plot.draw();
  });
};
