// A heat map: rows of ranks or nodes, columns of phases or nodes, a number in each cell.

const grid = (figure, spec) => {
  let at = 0;
  const windows = spec.windows ?? [spec];
  const known = windows.flatMap((one) => one.values.flat()).filter((value) => value !== null);
  const extreme = (pick) => known.reduce((a, b) => pick(a, b));
  const low = spec.low ?? extreme(Math.min);
  const high = spec.high ?? extreme(Math.max);
  const make = (width) => {
    const values = windows[at].values;
    const rows = windows[at].rows.map((label) => ({ label }));
    const range = [0, spec.columns.length];
    const steps = [1, 2, 3, 4, 5, 6].map((number) => colour("heat-" + number));
    const shade = (value) => {
      const share = high > low ? (value - low) / (high - low) : 0;
      return steps[Math.max(0, Math.min(5, Math.floor(share * 6)))];
    };
    const paint = (u) =>
      values.forEach((line, row) =>
        line.forEach((value, column) => {
          if (value === null) return bar(u, row, column, column + 1, colour("absent"), 0.15);
          bar(u, row, column, column + 1, shade(value), 0.94);
        }),
      );
    // A letter is about seven pixels wide.
    const letters = Math.max(2, Math.floor((width - 90) / Math.min(16, spec.columns.length) / 7));
    const fitting = (label) => (label.length > letters ? label.slice(0, letters - 1) + "…" : label);
    const labels = (u, splits) => splits.map((at) => fitting(spec.columns[Math.floor(at)] ?? ""));
    const options = rowChart(rows, range, spec.xLabel, labels, paint);
    // Labels under the middle of each column, as many as fit.
    const every = Math.ceil(spec.columns.length / 16);
    const middles = spec.columns.map((_, number) => number + 0.5).filter((_, number) => number % every === 0);
    options.axes[0].splits = () => middles;
    options.axes[0].grid = { show: false };
    const read = (u, left, top) => {
      const row = rowAt(u, top, rows);
      const column = Math.min(spec.columns.length - 1, Math.max(0, Math.floor(u.posToVal(left, "x"))));
      return `${rows[row].label}, ${spec.xLabel} ${spec.columns[column]}: ${short(values[row][column])} ${spec.unit}`;
    };
    return { options, data: [range, [null, null]], read, down: rowHeight(rows.length) };
  };
  const plot = addPlot(figure, make);
  choosing(figure, (chosen) => {
    at = chosen;
    plot.draw();
  });
};
