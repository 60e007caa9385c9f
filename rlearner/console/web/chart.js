// Lines over optimizer steps or time, with bands (intervals) and events on the axis. One canvas; only new points are sent.
// How it is shown (smoothing, axis, place) is that of charts.js.
const LEFT = 46, RIGHT = 8, TOP = 6, BOTTOM = 20;

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw, found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const PERIODS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((m) => m * MINUTE), ...[1, 2, 3, 6, 12].map((h) => h * HOUR), ...[1, 2, 7, 30].map((d) => d * DAY)];

// Round times with their labels: of the local clock, or since the begin of a run.
function timeTicks(low, high, count, is_elapsed) {
  const period = PERIODS.find((s) => s >= (high - low) / count) || Math.ceil((high - low) / count / DAY) * DAY;
  const shift = is_elapsed ? 0 : new Date(low * 1000).getTimezoneOffset() * MINUTE, found = [];
  for (let v = Math.ceil((low - shift) / period) * period + shift; v <= high; v += period) found.push([v, is_elapsed ? elapsed(v) : clock(v, period)]);
  return found;
}

function clock(v, period) {
  const at = new Date(v * 1000);
  if (period >= DAY) return at.toLocaleDateString("en-CA").slice(5);
  return at.toLocaleTimeString("en-GB").slice(0, period < MINUTE ? 8 : 5);
}

function elapsed(v) {
  const part = (size, unit) => `${Math.floor(v / size)} ${unit}`, rest = Math.round((v % HOUR) / MINUTE);
  if (v < MINUTE) return `${Math.round(v)} s`;
  return v < HOUR ? `${+(v / MINUTE).toFixed(1)} min` : part(HOUR, "h") + (rest && v < 10 * HOUR ? ` ${rest} min` : "");
}

// Whether a line is a bound of another one of its chart; such lines are off until they are asked for.
function isBound(name, lines) {
  const [, stem] = /^(.+)\/(?:min|max)$/.exec(name) || [];
  return stem !== undefined && lines.some((s) => s.name === `${stem}/mean`);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
  return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : Math.max(low, 0);
}

export default {
  template: `
    <figure class="chart" style="margin:0" :data-chart="arranged ? title : null" @dragover="over" @drop="drop">
      <div class="title"><h2 style="margin:0" :draggable="arranged" @dragstart="lift">{{ title }}</h2>
        <div class="legend"><button v-for="(s, i) in lines" :key="s.name" :aria-pressed="String(isShown(s))"
          @click="toggle(s.name)" :title="'show or hide ' + s.name"><span class="swatch" :style="{background: css(i, s), margin: 0}"></span>{{ s.name }} <b>{{ value(s) }}</b></button></div>
        <div v-if="arranged" class="places" role="group" :aria-label="'place of ' + title">
          <button @click="move_by(-1)" :aria-label="'move ' + title + ' forward'" title="earlier">‹</button><button @click="move_by(1)" :aria-label="'move ' + title + ' back'" title="later">›</button>
          <button @click="put('wide')" :aria-pressed="String(wide)" :aria-label="title + ' over the whole width'" title="whole width">↔</button><button @click="put('hidden')" :aria-label="'hide ' + title" title="hide">×</button></div>
      </div>
      <canvas ref="canvas" role="img" tabindex="0" :aria-label="label" :style="{height: height + 'px'}"
        @pointermove="move" @pointerleave="leave" @pointerdown="down" @pointerup="up" @dblclick="reset" @keydown="key"></canvas>
      <div v-if="tip" class="tip" :style="tip.style"><div class="dim">step {{ tip.x }}</div>
        <div v-for="row in tip.rows" :key="row.name"><span class="swatch" :style="{background: row.color}"></span>{{ row.name }} <b>{{ row.value }}</b></div>
        <div v-for="e in tip.events" :key="e" class="dim">{{ e }}</div></div>
    </figure>`,
  props: { title: String, series: Array, events: Array, height: { type: Number, default: 170 }, low: Number, high: Number, size: { type: Number, default: 2400 }, arranged: Boolean },
  data() { return { lines: [], hidden: {}, tip: null, at: null, zoom: null, drag: null, wide: false }; },
  created() { this.take(this.series || []); this.events_now = this.events || []; },
  mounted() {
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.$refs.canvas);
    this.theme = () => this.draw();
    this.heard = (e) => this[e.detail.kind](e.detail.what);
    this.arrange = () => {
      const view = rlearner.charts.view;
      if (this.axis !== view.axis) { this.axis = view.axis; this.zoom = null; this.tip = null; this.at = null; }
      if (this.arranged) { rlearner.charts.arrange(this.$el.parentElement, this.title); this.wide = view.wide.includes(this.title); this.hidden = view.lines; }
      this.draw();
    };
    this.axis = rlearner.charts.view.axis;
    window.addEventListener("chartview", this.arrange);
    window.addEventListener("chartdraw", this.theme);
    window.addEventListener("themechange", this.theme);
    window.addEventListener("charts", this.heard);
    this.arrange();
  },
  unmounted() { this.watcher.disconnect(); for (const name of ["themechange", "chartdraw"]) window.removeEventListener(name, this.theme); window.removeEventListener("chartview", this.arrange); window.removeEventListener("charts", this.heard); },
  computed: {
    label() { return `${this.title}: ` + this.lines.map((s) => `${s.name} ${this.value(s)}`).join(", ") + ". Arrow keys move along the steps."; },
  },
  methods: {
    take(series) { this.lines = series.map((s) => Object.freeze({ ...s })); },
    set(series) { this.take(series); this.draw(); },
    tell(kind, what) { rlearner.tellCharts(kind, what); },
    marks(events) { this.events_now = events; this.draw(); },
    points(news) { // {name: [steps, values]}
      if (!this.lines.some((s) => news[s.name])) return;
      this.lines = this.lines.map((s) => {
        const more = news[s.name];
        if (!more) return s;
        let x = [...s.x], y = [...s.y], means = s.means && [...s.means];
        more[0].forEach((step, i) => { if (!x.length || step > x[x.length - 1]) { x.push(step); y.push(more[1][i]); means?.push(more[1][i]); } });
        if (x.length > this.size) [x, y, means] = [x, y, means].map((all) => all?.filter((_, i) => i % 2 || i > x.length - 100));
        return Object.freeze({ ...s, x, y, means });
      });
      this.draw();
    },
    css(i, s) { return s.color || `var(--c${i % 8})`; },
    ink(i, s) { return rlearner.color(s.color ? s.color.slice(4, -1) : `--c${i % 8}`); },
    value(s) { return s.y.length ? rlearner.number(s.y[s.y.length - 1]) : "–"; },
    isShown(s) { return this.hidden[s.name] ?? !isBound(s.name, this.lines); },
    toggle(name) {
      const lines = { ...this.hidden, [name]: !this.isShown({ name }) };
      if (this.arranged) rlearner.charts.change({ lines }); else { this.hidden = lines; this.draw(); }
    },
    move_by(places) { rlearner.charts.move(this.title, places); },
    put(name) { rlearner.charts.toggle(name, this.title); },
    lift(e) { e.dataTransfer.setData("text/chart", this.title); e.dataTransfer.effectAllowed = "move"; },
    over(e) { if (this.arranged && e.dataTransfer.types.includes("text/chart")) e.preventDefault(); },
    drop(e) { const title = e.dataTransfer.getData("text/chart"); if (this.arranged && title) { e.preventDefault(); rlearner.charts.move(title, this.title); } },
    // A line as it is drawn: x on the axis, and y smoothed if it is a curve of many points.
    drawn() {
      return this.lines.map((s, i) => {
        const x = this.axis === "step" ? s.x : s.times || rlearner.charts.times(s.x);
        const share = s.dots ? 0 : rlearner.charts.view.smoothing, means = s.means || s.y;
        return { ...s, i, step: s.x, x, smooth: share ? rlearner.charts.smooth(s.x, means, share) : s.y };
      }).filter((s) => this.isShown(s));
    },
    ranges(shown) {
      let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
      for (const s of shown) if (s.x.length) { x0 = Math.min(x0, s.x[0]); x1 = Math.max(x1, s.x[s.x.length - 1]); }
      if (this.zoom) [x0, x1] = this.zoom;
      if (x0 === Infinity) [x0, x1] = [0, 1];
      if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
      for (const s of shown) for (let i = 0; i < s.x.length; i++) if (s.x[i] >= x0 && s.x[i] <= x1) {
        y0 = Math.min(y0, s.low ? s.low[i] : s.y[i]); y1 = Math.max(y1, s.high ? s.high[i] : s.y[i]);
      }
      if (y0 === Infinity) [y0, y1] = [0, 1];
      if (this.low !== undefined) y0 = Math.min(y0, this.low);
      if (this.high !== undefined) y1 = Math.max(y1, this.high);
      if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
      const pad = (y1 - y0) * 0.04;
      return [x0, x1, y0 - (this.low === y0 ? 0 : pad), y1 + pad];
    },
    draw() {
      if (this.waiting) return;
      this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); });
    },
    paint() {
      const canvas = this.$refs.canvas;
      if (!canvas || !canvas.clientWidth) return;
      const scale = devicePixelRatio || 1, w = canvas.clientWidth, h = this.height, c = canvas.getContext("2d");
      canvas.width = w * scale; canvas.height = h * scale; c.scale(scale, scale);
      const shown = this.drawn(), [x0, x1, y0, y1] = this.ranges(shown), line = rlearner.color("--line"), dim = rlearner.color("--dim");
      const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (w - LEFT - RIGHT), Y = (y) => TOP + (1 - (y - y0) / (y1 - y0)) * (h - TOP - BOTTOM);
      this.map = { x0, x1, X, w, shown };
      c.font = "11px system-ui, sans-serif"; c.lineWidth = 1; c.textBaseline = "middle"; c.textAlign = "right";
      for (const v of ticks(y0, y1, h < 120 ? 3 : 4)) {
        c.strokeStyle = line; c.beginPath(); c.moveTo(LEFT, Math.round(Y(v)) + 0.5); c.lineTo(w - RIGHT, Math.round(Y(v)) + 0.5); c.stroke();
        c.fillStyle = dim; c.fillText(rlearner.tick(+v.toPrecision(4)), LEFT - 6, Y(v));
      }
      c.textAlign = "center"; c.textBaseline = "alphabetic";
      for (const [v, text] of this.marksOfAxis(x0, x1, Math.max(2, Math.floor(w / 110)))) c.fillText(text, X(v), h - 5);
      c.save(); c.beginPath(); c.rect(LEFT, 0, w - LEFT - RIGHT, h - BOTTOM + 4); c.clip();
      for (const e of this.placed()) if (e.x >= x0 && e.x <= x1) {
        c.strokeStyle = e.kind === "death" || e.kind === "failed" ? rlearner.color("--bad") : e.kind === "epoch" ? rlearner.color("--warn") : dim;
        c.globalAlpha = 0.45; c.setLineDash(e.kind === "checkpoint" ? [1, 4] : [3, 3]);
        c.beginPath(); c.moveTo(X(e.x), TOP); c.lineTo(X(e.x), h - BOTTOM); c.stroke();
        c.setLineDash([]); c.globalAlpha = 1;
        c.fillStyle = c.strokeStyle; c.beginPath(); c.moveTo(X(e.x) - 3, h - BOTTOM + 4); c.lineTo(X(e.x) + 3, h - BOTTOM + 4); c.lineTo(X(e.x), h - BOTTOM - 1); c.fill();
      }
      shown.forEach((s) => {
        const ink = this.ink(s.i, s);
        if (s.low) {
          c.globalAlpha = 0.16; c.fillStyle = ink; c.beginPath();
          for (let k = 0; k < s.x.length; k++) c.lineTo(X(s.x[k]), Y(s.high[k]));
          for (let k = s.x.length - 1; k >= 0; k--) c.lineTo(X(s.x[k]), Y(s.low[k]));
          c.fill(); c.globalAlpha = 1;
        }
        c.strokeStyle = ink; c.fillStyle = ink; c.lineJoin = "round";
        const curves = s.smooth === s.y ? [[s.y, 1.5, 1]] : [[s.y, 1, 0.3], [s.smooth, 1.75, 1]];
        for (const [y, width, alpha] of curves) {
          c.lineWidth = width; c.globalAlpha = alpha; c.beginPath();
          for (let k = 0; k < s.x.length; k++) c.lineTo(X(s.x[k]), Y(y[k]));
          c.stroke();
        }
        if (s.dots || s.x.length < 3) for (let k = 0; k < s.x.length; k++) { c.beginPath(); c.arc(X(s.x[k]), Y(s.y[k]), 2.5, 0, 7); c.fill(); }
      });
      if (this.drag) { c.globalAlpha = 0.15; c.fillStyle = rlearner.color("--accent"); c.fillRect(this.drag[0], TOP, this.drag[1] - this.drag[0], h - TOP - BOTTOM); c.globalAlpha = 1; }
      if (this.at !== null) { c.strokeStyle = dim; c.lineWidth = 1; c.beginPath(); c.moveTo(Math.round(X(this.at)) + 0.5, TOP); c.lineTo(Math.round(X(this.at)) + 0.5, h - BOTTOM); c.stroke(); }
      c.restore();
    },
    show(x) {
      const rows = [];
      let at = null;
      let step = null;
      this.map.shown.forEach((s) => {
        if (!s.x.length) return;
        const k = nearest(s.x, x);
        if (at === null || Math.abs(s.x[k] - x) < Math.abs(at - x)) { at = s.x[k]; step = s.step[k]; }
        const band = s.low ? ` (${rlearner.number(s.low[k])} to ${rlearner.number(s.high[k])})` : s.smooth === s.y ? "" : `, around it ${rlearner.number(s.smooth[k])}`;
        rows.push({ name: s.name, color: this.ink(s.i, s), value: rlearner.number(s.y[k]) + band });
      });
      if (at === null) return;
      const px = this.map.X(at), near = (this.map.x1 - this.map.x0) / this.map.w * 5;
      const events = this.placed().filter((e) => Math.abs(e.x - at) <= near).slice(0, 4).map((e) => e.text);
      this.at = at;
      this.tip = { x: step.toLocaleString("en-US") + this.when(step, at), rows, events, style: { top: "34px", ...(px > this.map.w / 2 ? { right: `${this.map.w - px + 10}px` } : { left: `${px + 10}px` }) } };
      this.draw();
    },
    placed() { // events on the axis
      const all = this.events_now;
      if (this.axis === "step") return all.map((e) => ({ ...e, x: e.step }));
      return all.map((e) => ({ ...e, x: rlearner.charts.times([e.step])[0] }));
    },
    isElapsed() { return this.lines.some((s) => s.times); },
    marksOfAxis(x0, x1, count) {
      if (this.axis === "time") return timeTicks(x0, x1, count, this.isElapsed());
      return ticks(x0, x1, count).filter(Number.isInteger).map((v) => [v, v.toLocaleString("en-US")]);
    },
    when(step, at) { // of a step, if that is known
      if (this.axis === "time" && this.isElapsed()) return `, after ${elapsed(at)}`;
      if (!rlearner.charts.clock.x.length || this.isElapsed()) return "";
      const time = new Date(rlearner.charts.times([step])[0] * 1000);
      return `, ${time.toLocaleDateString("en-CA").slice(5)} ${time.toLocaleTimeString("en-GB")}`;
    },
    step(e) { const { x0, x1, w } = this.map; return x0 + ((e.offsetX - LEFT) / (w - LEFT - RIGHT)) * (x1 - x0); },
    move(e) { if (!this.map) return; if (this.drag) { this.drag = [this.drag[0], e.offsetX]; this.draw(); } else this.show(this.step(e)); },
    leave() { this.tip = null; this.at = null; this.draw(); },
    down(e) { if (e.pointerType === "mouse") this.drag = [e.offsetX, e.offsetX]; },
    up(e) {
      const drag = this.drag; this.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 8) {
        const { x0, x1, w } = this.map, of = (p) => x0 + ((p - LEFT) / (w - LEFT - RIGHT)) * (x1 - x0);
        this.tell("show_range", [of(Math.min(...drag)), of(Math.max(...drag))]);
      } else this.draw();
    },
    reset() { this.tell("show_range", null); },
    show_range(range) { this.zoom = range; this.draw(); },
    key(e) {
      const s = this.map?.shown.find((one) => one.x.length);
      if (!s) return;
      const at = this.at === null ? s.x.length - 1 : nearest(s.x, this.at);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: s.x.length - 1 }[e.key];
      if (e.key === "Escape") { this.leave(); this.reset(); }
      if (to === undefined) return;
      e.preventDefault(); this.show(s.x[Math.min(Math.max(to, 0), s.x.length - 1)]);
    },
  },
};
