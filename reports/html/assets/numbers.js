// Formatting of numbers, parsing of ranks, and the median.

const short = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};

// "3, 17-20" as a list of the ranks that exist.
const parseRanks = (text, known) => {
  const chosen = new Set();
  for (const part of text.split(/[\s,]+/)) {
    const match = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (!match) continue;
    const first = Number(match[1]);
    const last = Math.min(Number(match[2] ?? first), first + 4096);
    for (let rank = first; rank <= last; rank++) if (known.has(rank)) chosen.add(rank);
  }
  return [...chosen];
};

const median = (values) => {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!known.length) return null;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
};
