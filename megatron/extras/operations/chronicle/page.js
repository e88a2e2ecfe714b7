// Draws the charts for each axis, scale, mean and range, and filters the tables.
// The elements of the charts exist already, in the order of the data. Text from a run is only ever
// written as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { left, right, width, top, bottom, lane, largest, axes } = data.layout;
  const state = { axis: "iteration", mean: "1", log: false, range: null, hidden: new Set() };
  const find = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  // These have no lines and table rows at first, but their dots have a row of their own.
  const quiet = new Set(find(".kind:not([checked])").map((box) => box.value));
  const figures = find("figure[data-panel]");
  const readout = document.getElementById("readout");

  const isShown = (v) => v !== null && Math.abs(v) < largest;
  const plain = (value, percent) => {
    if (percent) return `${+(100 * value).toPrecision(4)} %`;
    const size = Math.abs(value);
    if (value && (size < 1e-3 || size >= 1e9)) return `${+value.toPrecision(4)}`;
    const digits = Number.isInteger(value) ? 15 : 5;
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  };
  const valuesOf = (curve) => curve.y[state.mean] || curve.y["1"];
  const positionsOf = (item) => item.x[state.axis];

  function extent(values, start) {
    let [low, high] = start || [Infinity, -Infinity];
    for (const value of values) {
      if (!isShown(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }

  function fullRange() {
    let range = null;
    for (const panel of data.panels)
      for (const curve of panel.curves) range = extent(positionsOf(curve), range);
    for (const item of [...data.bands, ...data.events]) range = extent(positionsOf(item), range);
    return widen(range || [0, 1]);
  }

  function widen([low, high]) {
    if (!(low <= high)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  function makeScale([low, high], start, end, log) {
    const map = log ? Math.log10 : (value) => value;
    const [a, b] = [map(low), map(high)];
    return (value) => start + ((map(value) - a) / (b - a)) * (end - start);
  }

  function listTicks([low, high], count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= 0.999 * raw);
    const ticks = [];
    for (let n = Math.ceil(low / step); n <= Math.floor(high / step); n++)
      ticks.push(+(n * step).toPrecision(12));
    return ticks;
  }

  function listLogTicks([low, high], count) {
    const decades = Math.log10(high / low);
    if (decades < 0.7) return listTicks([low, high], count);
    const factors = decades < 3 ? [1, 2, 5] : [1];
    const skip = Math.ceil(decades / (2 * count));
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += skip)
      for (const factor of factors) {
        const tick = +(factor * 10 ** power).toPrecision(3);
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    return ticks;
  }

  function make(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function yRange(panel, range, log) {
    const inside = [];
    const take = (at, value) => {
      if (at !== null && at >= range[0] && at <= range[1] && isShown(value))
        if (!log || value > 0) inside.push(value);
    };
    for (const curve of panel.curves) {
      const values = valuesOf(curve);
      positionsOf(curve).forEach((at, n) => take(at, values[n]));
    }
    for (const mark of panel.marks) take(positionsOf(mark)[0], mark.y);
    const [low, high] = widen(extent(inside));
    return log && low <= 0 ? [0.1, 10] : [low, high];
  }

  function drawPath(curve, x, y, log) {
    const values = valuesOf(curve);
    let path = "";
    let open = false;
    positionsOf(curve).forEach((at, n) => {
      const value = values[n];
      if (at === null || !isShown(value) || (log && value <= 0)) {
        open = false;
        return;
      }
      path += `${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h0"}`;
      open = true;
    });
    return path;
  }

  const isIn = (at, range) => at !== null && at >= range[0] && at <= range[1];

  function drawBackground(figure, x, range) {
    find(".bands rect", figure).forEach((rect, n) => {
      const [first, last] = positionsOf(data.bands[n]);
      const from = x(Math.max(first, range[0]));
      const to = x(Math.min(last, range[1]));
      rect.setAttribute("x", from);
      rect.setAttribute("width", Math.max(1.5, to - from));
      rect.toggleAttribute("hidden", last < range[0] || first > range[1]);
    });
    find(".lines line", figure).forEach((line, n) => {
      const mark = data.lines[n];
      const at = positionsOf(mark)[0];
      line.setAttribute("x1", x(at));
      line.setAttribute("x2", x(at));
      line.toggleAttribute("hidden", !isIn(at, range) || state.hidden.has(mark.kind));
    });
  }

  function drawXTicks(grid, x, range, height) {
    for (const tick of listTicks(range, 8))
      grid.append(make("text", { x: x(tick), y: height + 15, class: "x" }, plain(tick)));
  }

  function draw() {
    const range = state.range || fullRange();
    const x = makeScale(range, left, width - right, false);
    for (const figure of figures) {
      const svg = figure.querySelector("svg");
      const height = svg.viewBox.baseVal.height - bottom;
      const grid = figure.querySelector(".grid");
      drawBackground(figure, x, range);
      if (figure.dataset.panel === "events") {
        find(".x", grid).forEach((each) => each.remove());
        drawXTicks(grid, x, range, height);
        find(".event", figure).forEach((circle, n) => {
          const mark = data.events[n];
          const at = positionsOf(mark)[0];
          const row = lane * data.labels.indexOf(mark.kind) + 8;
          circle.setAttribute("transform", `translate(${x(at)} ${row})`);
          const isHidden = state.hidden.has(mark.kind) && !quiet.has(mark.kind);
          circle.toggleAttribute("hidden", !isIn(at, range) || isHidden);
        });
        continue;
      }
      const panel = data.panels[+figure.dataset.panel];
      const log = state.log && !panel.is_percent;
      const ys = yRange(panel, range, log);
      const y = makeScale(ys, height, top, log);
      grid.replaceChildren();
      const count = Math.max(2, Math.floor((height + bottom) / 40));
      for (const tick of log ? listLogTicks(ys, count) : listTicks(ys, count)) {
        const at = y(tick);
        grid.append(make("line", { x1: left, x2: width - right, y1: at, y2: at }));
        const text = plain(tick, panel.is_percent);
        grid.append(make("text", { x: left - 6, y: at + 4, class: "y" }, text));
      }
      drawXTicks(grid, x, range, height);
      find(".curves path", figure).forEach((path, n) =>
        path.setAttribute("d", drawPath(panel.curves[n], x, y, log)),
      );
      find(".marks .dropped", figure).forEach((path, n) => {
        const mark = panel.marks[n];
        const at = positionsOf(mark)[0];
        const isLost = !isShown(mark.y) || (log && mark.y <= 0);
        path.setAttribute("transform", `translate(${x(at)} ${isLost ? top : y(mark.y)})`);
        path.toggleAttribute("hidden", !isIn(at, range));
      });
    }
    document.body.dataset.view = JSON.stringify({ ...state, hidden: [...state.hidden] });
  }

  // The nearest value of a curve, unless the curve has a gap there.
  function nearest(curve, at) {
    const positions = positionsOf(curve);
    const values = valuesOf(curve);
    let best = -1;
    let last = null;
    let spacing = Infinity;
    positions.forEach((each, n) => {
      if (each === null || values[n] === null) return;
      if (best < 0 || Math.abs(each - at) < Math.abs(positions[best] - at)) best = n;
      if (last !== null && each > last) spacing = Math.min(spacing, each - last);
      last = each;
    });
    const range = state.range || fullRange();
    const pixels = (range[1] - range[0]) / 500;
    const reach = Math.max(spacing === Infinity ? 0 : 0.6 * spacing, pixels);
    if (best < 0 || Math.abs(positions[best] - at) > reach) return null;
    return values[best];
  }

  function toPosition(svg, clientX) {
    const box = svg.getBoundingClientRect();
    const share = (((clientX - box.left) / box.width) * width - left) / (width - left - right);
    const [low, high] = state.range || fullRange();
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  }

  function hover(at) {
    const range = state.range || fullRange();
    const x = makeScale(range, left, width - right, false)(at);
    for (const figure of figures) {
      const cursor = figure.querySelector(".cursor");
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      if (figure.dataset.panel === "events") continue;
      const panel = data.panels[+figure.dataset.panel];
      const shown = [];
      const isLast = (curve) => curve.kind === "abandoned";
      for (const curve of [...panel.curves].sort((a, b) => isLast(a) - isLast(b))) {
        const value = nearest(curve, at);
        if (value !== null) shown.push(`${curve.name} ${plain(value, panel.is_percent)}`);
      }
      figure.querySelector(".values").textContent = shown.join("  ·  ");
    }
    const pixels = (range[1] - range[0]) / 160;
    const near = [...data.bands, ...data.events].filter((item) => {
      if (state.hidden.has(item.kind)) return false;
      const ends = positionsOf(item);
      return ends[0] - pixels <= at && at <= ends[ends.length - 1] + pixels;
    });
    const where = state.axis === "hours" ? at.toFixed(3) : Math.round(at).toLocaleString("en");
    const texts = near.slice(0, 4).map((item) => item.text);
    if (near.length > 4) texts.push(`${near.length - 4} more`);
    readout.textContent = [`${axes[state.axis]} ${where}`, ...texts].join("  ·  ");
  }

  function clear() {
    for (const cursor of find(".cursor")) {
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
    }
    for (const values of find(".values")) values.textContent = "";
    readout.textContent = readout.dataset.help;
  }

  let start = null;
  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    const zoom = svg.appendChild(make("rect", { class: "zoom", y: 0, height: 999, hidden: "" }));
    svg.addEventListener("pointerdown", (event) => {
      start = toPosition(svg, event.clientX);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const at = toPosition(svg, event.clientX);
      hover(at);
      if (start === null) return;
      const x = makeScale(state.range || fullRange(), left, width - right, false);
      zoom.setAttribute("x", Math.min(x(start), x(at)));
      zoom.setAttribute("width", Math.abs(x(at) - x(start)));
      zoom.removeAttribute("hidden");
    });
    svg.addEventListener("pointerup", (event) => {
      const ends = [start, toPosition(svg, event.clientX)].sort((a, b) => a - b);
      const [low, high] = state.range || fullRange();
      zoom.setAttribute("hidden", "");
      // A click without a movement is no range.
      if (start !== null && ends[1] - ends[0] > (high - low) / 100) setRange(ends);
      start = null;
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("dblclick", () => setRange(null));
  }

  function setRange(range) {
    state.range = range;
    document.getElementById("reset").hidden = range === null;
    draw();
  }

  document.getElementById("reset").addEventListener("click", () => setRange(null));
  document.getElementById("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    setRange(null);
  });
  document.getElementById("mean").addEventListener("change", (event) => {
    state.mean = event.target.value;
    draw();
  });
  document.getElementById("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    draw();
  });
  function filterEvents() {
    state.hidden = new Set(find(".kind:not(:checked)").map((box) => box.value));
    for (const row of find("tr[data-kind]")) row.hidden = state.hidden.has(row.dataset.kind);
    draw();
  }
  for (const box of find(".kind"))
    box.addEventListener("change", () => {
      // Each run has its own table, and the charts have the events of all of them.
      for (const other of find(".kind"))
        if (other.value === box.value) other.checked = box.checked;
      filterEvents();
    });
  for (const field of find(".search"))
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of find("tr", field.closest("section").querySelector("tbody.settings")))
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });

  document.documentElement.classList.add("js");
  clear();
  filterEvents();
})();
