// Agreement: one row for each rank, one column for each step. Many ranks share rows, which can be expanded.

const MOST_ROWS = 48;

const strip = (figure, spec) => {
  let shown = spec.ranks;
  const back = figure.querySelector(".back");

  const blocks = () => {
    // Powers of two, as nodes and switches have.
    const size = 2 ** Math.ceil(Math.log2(Math.max(1, shown.length / MOST_ROWS)));
    const rows = [];
    for (let at = 0; at < shown.length; at += size) {
      const ranks = shown.slice(at, at + size);
      const last = ranks[ranks.length - 1];
      rows.push({ ranks, label: ranks.length > 1 ? `${ranks[0]}-${last}` : String(ranks[0]) });
    }
    return rows;
  };

  const range = [Math.min(...spec.stretches.map((one) => one.first)), Math.max(...spec.stretches.map((one) => one.last)) + 1];

  // The worst state of its ranks is the state of a row.
  const stateOf = (stretch, ranks) => {
    const outliers = ranks.filter((rank) => stretch.outliers.has(rank)).length;
    const absent = ranks.filter((rank) => stretch.missing.has(rank)).length;
    if (outliers) return { kind: stretch.majority ? "outlier" : "split", count: outliers };
    if (absent === ranks.length) return { kind: "absent", count: absent };
    if (absent) return { kind: "partly", count: absent };
    return { kind: "agree", count: ranks.length };
  };
  const stretches = spec.stretches.map((one) => ({ ...one, outliers: new Set(one.odd), missing: new Set(one.absent) }));
  const words = { outlier: "differs from the majority", split: "differs, no majority", absent: "no record", partly: "no record", agree: "agrees" };

  const make = () => {
    const rows = blocks();
    const states = stretches.map((stretch) => rows.map((row) => stateOf(stretch, row.ranks)));
    const fills = { outlier: colour("error"), split: colour("warning"), absent: colour("absent"), partly: colour("absent"), agree: colour("ok") };
    const shares = { outlier: 0.96, split: 0.96, absent: 0.15, partly: 0.5, agree: 0.5 };
    const paint = (u) => {
      stretches.forEach((stretch, number) =>
        rows.forEach((_, row) => {
          const { kind } = states[number][row];
          bar(u, row, stretch.first, stretch.last + 1, fills[kind], shares[kind]);
        }),
      );
    };
    const steps = (u, splits) => splits.map((at) => (at === -1 ? "wrap" : Number.isInteger(at) ? at : ""));
    const options = rowChart(rows, range, "step", steps, paint);
    const read = (u, left, top) => {
      const step = Math.floor(u.posToVal(left, "x"));
      const row = rows[rowAt(u, top, rows)];
      const when = step < 0 ? "after wrapping" : `step ${step}`;
      const number = stretches.findLastIndex((one) => one.first <= step && step <= one.last);
      if (number < 0) return `${when}: not compared`;
      const { kind, count } = stateOf(stretches[number], row.ranks);
      const who = row.ranks.length > 1 ? `ranks ${row.label}, ${count} of ${row.ranks.length}` : `rank ${row.label}`;
      return `${when}, ${who}: ${words[kind]}`;
    };
    return { options, data: [range, [null, null]], read, down: rowHeight(rows.length) };
  };

  const plot = addPlot(figure, make);
  const open = () => {
    const rows = blocks();
    if (rows[0].ranks.length === 1) return;
    shown = rows[rowAt(plot.plot, plot.plot.cursor.top, rows)].ranks;
    back.hidden = false;
    plot.draw();
  };
  plot.holder.addEventListener("click", open);
  plot.holder.addEventListener("keydown", (event) => event.key === "Enter" && open());
  back.addEventListener("click", () => {
    shown = spec.ranks;
    back.hidden = true;
    plot.draw();
  });
};
