// Lines over steps. With many ranks: minimum, median and maximum, and the ranks that the reader enters.

const MOST_LINES = 12;

const lines = (figure, spec) => {
  const ofRanks = spec.series.filter((one) => one.rank !== undefined);
  const others = spec.series.filter((one) => one.rank === undefined);
  const many = ofRanks.length > MOST_LINES;
  const byRank = new Map(ofRanks.map((one) => [one.rank, one]));
  const asked = figure.querySelector(".asked");
  let chosen = spec.chosen ?? [];

  const summary = () => {
    const columns = spec.x.map((_, at) => ofRanks.map((one) => one.values[at]).filter((value) => value !== null));
    const over = (pick) => columns.map((column) => (column.length ? pick(column) : null));
    return [
      { label: `minimum of ${ofRanks.length} ranks`, values: over((column) => column.reduce((a, b) => Math.min(a, b))) },
      { label: "median rank", values: over(median) },
      { label: "maximum", values: over((column) => column.reduce((a, b) => Math.max(a, b))) },
    ];
  };
  const summarised = many ? summary() : [];

  // Where findings begin: a vertical line with their codes.
  const marks = (u) => {
    const ratio = devicePixelRatio || 1;
    u.ctx.save();
    u.ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
    for (const mark of spec.marks ?? []) {
      if (mark.x < u.scales.x.min || mark.x > u.scales.x.max) continue;
      const left = Math.round(u.valToPos(mark.x, "x", true));
      const right = left + u.ctx.measureText(mark.label).width + 6 * ratio > u.bbox.left + u.bbox.width;
      u.ctx.strokeStyle = u.ctx.fillStyle = colour(mark.colour);
      u.ctx.lineWidth = 2 * ratio;
      u.ctx.beginPath();
      u.ctx.moveTo(left, u.bbox.top);
      u.ctx.lineTo(left, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
      u.ctx.textAlign = right ? "right" : "left";
      u.ctx.fillText(mark.label, left + (right ? -4 : 4) * ratio, u.bbox.top + 11 * ratio);
    }
    u.ctx.restore();
  };

  const make = (width) => {
    const shown = many ? [...summarised, ...chosen.map((rank) => byRank.get(rank))] : ofRanks;
    const series = [...shown, ...others];
    // A logarithmic scale cannot show zero.
    const fit = (values) => (spec.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const alone = spec.x.length < 40;
    const options = {
      height: Math.max(220, Math.min(320, width * 0.45)),
      scales: {
        x: { time: false },
        y: spec.log ? { distr: 3 } : { range: (u, min, max) => [Math.min(0, min ?? 0), (max ?? 1) * 1.08 || 1] },
      },
      cursor: { drag: { x: true, y: false } },
      legend: { live: false },
      hooks: { draw: [marks] },
      axes: [
        axis({ label: spec.xLabel ?? "step", labelSize: 18, size: 34, values: (u, splits) => splits.map((at) => (Number.isInteger(at) || spec.xLabel ? short(at) : "")) }),
        axis({ label: spec.yLabel, labelSize: 18, size: 62, values: (u, splits) => splits.map((at) => (at === null ? "" : short(at))) }),
      ],
      series: [
        { label: spec.xLabel ?? "step" },
        ...series.map((one, number) => ({
          label: one.label,
          stroke: one.strong ? colour("ink") : lineColour(number),
          width: one.strong && spec.x.length < 400 ? 2.5 : 1.5,
          dash: one.limit ? [3, 4] : lineDash(number),
          points: { show: alone && !one.limit, size: 5 },
          spanGaps: true,
        })),
      ],
    };
    const read = (u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) return "";
      const parts = series.filter((_, number) => u.series[number + 1].show).map((one) => `${one.label} ${short(one.values[at])}`);
      const unit = spec.unit ? ` ${spec.unit}` : "";
      return `${spec.xLabel ?? "step"} ${short(spec.x[at])}: ${parts.join(", ")}${unit}`;
    };
    return { options, data: [spec.x, ...series.map((one) => fit(one.values))], read };
  };

  const plot = addPlot(figure, make);
  if (many && asked) {
    asked.hidden = false;
    const input = asked.querySelector("input");
    input.value = chosen.join(", ");
    input.addEventListener("change", () => {
      chosen = parseRanks(input.value, new Set(byRank.keys())).slice(0, 24);
      plot.draw();
    });
  }
};
