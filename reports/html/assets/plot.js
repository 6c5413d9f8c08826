// One chart: redrawn when its width or the colours change, and usable by keyboard.

class Plot {
  // make(width) returns uPlot's options and data, and read(plot, left, top): the text for the cursor's position.
  constructor(figure, make) {
    this.figure = figure;
    this.make = make;
    this.holder = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    this.holder.tabIndex = 0;
    // Screen readers do not forward keys to an image.
    this.holder.setAttribute("role", "application");
    this.holder.setAttribute("aria-roledescription", "chart");
    this.holder.addEventListener("keydown", (event) => this.key(event));
    // Screen readers announce moves of the cursor only while the chart has the focus.
    this.holder.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.holder.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    this.draw();
  }

  draw(width = this.holder.clientWidth) {
    if (this.plot) this.plot.destroy();
    this.width = width;
    const { options, data, read, down } = this.make(width);
    this.read = read;
    // How far a key moves the cursor up or down: one row, if there are rows.
    this.down = down ?? 5;
    options.hooks = { ...options.hooks, setCursor: [() => this.updateReadout()] };
    options.width = width;
    this.plot = new uPlot(options, data, this.holder);
    this.holder.querySelectorAll(".u-legend th").forEach((label, number) => this.toggled(label, number + 1));
  }

  // An entry of the legend hides and shows its line, by mouse and by keyboard.
  toggled(label, series) {
    const update = () => label.setAttribute("aria-pressed", String(this.plot.series[series].show));
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    label.addEventListener("click", update);
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      label.click();
    });
    update();
  }

  updateReadout() {
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
