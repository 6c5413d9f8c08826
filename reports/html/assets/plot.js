// One chart on the page: draws itself anew when its width or the colours change, and can be used by keyboard.

class Plot {
  // make(width) gives uPlot's options and data, and read(plot, left, top): what stands under the cursor, in words.
  constructor(figure, make) {
    this.figure = figure;
    this.make = make;
    this.holder = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    this.holder.tabIndex = 0;
    // To a picture screen readers hand no keys on.
    this.holder.setAttribute("role", "application");
    this.holder.setAttribute("aria-roledescription", "chart");
    this.holder.addEventListener("keydown", (event) => this.key(event));
    // Only who uses the keyboard has every move read out.
    this.holder.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.holder.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    this.draw();
  }

  draw(width = this.holder.clientWidth) {
    if (this.plot) this.plot.destroy();
    this.width = width;
    const { options, data, read, down } = this.make(width);
    this.read = read;
    // How far the cursor goes up or down at a key: a row, where there are rows.
    this.down = down ?? 5;
    options.hooks = { ...options.hooks, setCursor: [() => this.tell()] };
    options.width = width;
    this.plot = new uPlot(options, data, this.holder);
    this.holder.querySelectorAll(".u-legend th").forEach((label, number) => this.toggled(label, number + 1));
  }

  // An entry of the legend takes its line away and brings it back, by mouse and by keyboard.
  toggled(label, series) {
    const tell = () => label.setAttribute("aria-pressed", String(this.plot.series[series].show));
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    label.addEventListener("click", tell);
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      label.click();
    });
    tell();
  }

  tell() {
    const { left, top } = this.plot.cursor;
    this.readout.textContent = left >= 0 ? this.read(this.plot, left, top) : this.readout.dataset.rest;
  }

  key(event) {
    const plot = this.plot;
    const box = { width: plot.over.clientWidth, height: plot.over.clientHeight };
    const at = plot.cursor.left >= 0 ? plot.cursor : { left: box.width / 2, top: box.height / 2 };
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) {
      const [across, down] = moves[event.key];
      const step = event.shiftKey ? 50 : 5;
      plot.setCursor({
        left: Math.min(box.width - 1, Math.max(0, at.left + across * step)),
        top: Math.min(box.height - 1, Math.max(0, at.top + down * this.down)),
      });
    } else if (event.key === "+" || event.key === "-") {
      this.zoom(plot.posToVal(at.left, "x"), event.key === "+" ? 0.5 : 2);
    } else if (event.key === "Escape") {
      this.draw();
    } else return;
    event.preventDefault();
  }

  zoom(centre, factor) {
    const { min, max } = this.plot.scales.x;
    const half = ((max - min) * factor) / 2;
    this.plot.setScale("x", { min: centre - half, max: centre + half });
  }
}

const plots = [];
const addPlot = (figure, make) => {
  const plot = new Plot(figure, make);
  plots.push(plot);
  return plot;
};
