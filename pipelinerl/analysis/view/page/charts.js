// Line charts with uPlot, in the colors of the page.

const drawn = new Set();
/** Distances of ticks of what is counted. */
const WHOLE = [1, 2, 5]
  .flatMap((first) => [...Array(8).keys()].map((power) => first * 10 ** power))
  .sort((a, b) => a - b);
/** Curves with fewer points show each. */
const FEW = 20;
/** Colors of curves; from then on they repeat, dashed. */
const COLORS = 6;

function shown(value, digits) {
  if (value === null || value === undefined) return '–';
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

function newest(values) {
  return values.findLast((value) => value !== null && value !== undefined);
}

/** A color of the page as the canvas understands it, in the present theme. */
function colorOf(element, name) {
  element.style.color = `var(${name})`;
  const {color} = getComputedStyle(element);
  element.style.color = '';
  return color;
}

/** Draw all charts again, in the colors of the present theme. */
export function redrawCharts() {
  drawn.forEach((chart) => (chart.element.isConnected ? chart.draw() : chart.forget()));
}

/** Values of several curves over one common x: [{x, y}] to [xs, ys...] with null where a curve has no value. */
export function align(curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const places = new Map(xs.map((x, index) => [x, index]));
  const columns = curves.map((curve) => {
    const column = new Array(xs.length).fill(null);
    curve.x.forEach((x, index) => {
      column[places.get(x)] = curve.y[index];
    });
    return column;
  });
  return [xs, ...columns];
}

/** A chart; `set` gives it curves: [{name, x, y, isPoints?}]. `label` says what it shows. */
export class LineChart {
  constructor(label, {height = 190, xLabel = 'step'} = {}) {
    this.label = label;
    this.height = height;
    this.xLabel = xLabel;
    this.curves = [];
    this.plot = null;
    this.element = document.createElement('div');
    this.element.className = 'chart';
    this.element.setAttribute('role', 'img');
    this.watch = new ResizeObserver(() => this.fit());
    this.watch.observe(this.element);
    drawn.add(this);
  }

  set(curves, xLabel = this.xLabel) {
    const names = (list) => list.map((curve) => curve.name).join('\n');
    const isSame = this.plot && names(curves) === names(this.curves) && xLabel === this.xLabel;
    this.curves = curves;
    this.xLabel = xLabel;
    this.element.setAttribute('aria-label', this.description());
    if (isSame) this.plot.setData(align(curves));
    else this.draw();
  }

  draw() {
    this.forgetPlot();
    const width = this.element.clientWidth;
    if (!width || !this.curves.length) return;
    const color = (name) => colorOf(this.element, name);
    const grid = {stroke: color('--line'), width: 1};
    const axis = {stroke: color('--muted'), grid, ticks: {...grid, size: 4}, font: '11px system-ui, sans-serif'};
    const series = this.curves.map((curve, index) => {
      const stroke = color(`--curve-${index % COLORS}`);
      return {
        label: curve.name,
        stroke,
        width: 1.6,
        dash: index < COLORS ? undefined : [6, 4],
        spanGaps: true,
        ...(curve.isPoints ? {paths: () => null} : {}),
        points: curve.isPoints
          ? {show: true, size: 8, fill: stroke, stroke: color('--panel'), width: 1.5}
          : {show: curve.x.length < FEW, size: 4, fill: stroke},
        value: (plot, value, place, at) => shown(at === null ? newest(plot.data[place]) : value, 4),
      };
    });
    this.plot = new uPlot(
      {
        width,
        height: this.height,
        series: [
          {label: this.xLabel, value: (plot, x, place, at) => shown(at === null ? newest(plot.data[0]) : x, 6)},
          ...series,
        ],
        axes: [
          {...axis, size: 28, ...(this.xLabel.startsWith('hours') ? {} : {incrs: WHOLE})},
          {...axis, size: 52, values: (_, ticks) => ticks.map((tick) => shown(tick, 4))},
        ],
        scales: {x: {time: false}, y: {range: (_, low, high) => padded(low, high)}},
        cursor: {y: false, points: {size: 6}, drag: {x: true, y: false}},
        legend: {live: true},
      },
      align(this.curves),
      this.element,
    );
  }

  fit() {
    const width = this.element.clientWidth;
    if (!this.plot) this.draw();
    else if (width && width !== this.plot.width) this.plot.setSize({width, height: this.height});
  }

  description() {
    const last = this.curves.map((curve) => {
      const known = curve.y.filter((value) => value !== null);
      return `${curve.name}: ${known.length ? shown(known.at(-1), 4) : 'no value'}`;
    });
    return `${this.label}. Newest values: ${last.join(', ') || 'none yet'}`;
  }

  forgetPlot() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  forget() {
    this.forgetPlot();
    this.watch.disconnect();
    drawn.delete(this);
  }
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  const from = low >= 0 && low - room < 0 ? 0 : low - room;
  return [from, high + room];
}
