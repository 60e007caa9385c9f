// Lines over optimizer steps, with bands (intervals) and events on the axis. One canvas; only new points are sent.
const LEFT = 46, RIGHT = 8, TOP = 6, BOTTOM = 20;

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw, found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
  return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : Math.max(low, 0);
}

export default {
  template: `
    <figure class="chart" style="margin:0">
      <div class="title"><h2 style="margin:0">{{ title }}</h2>
        <div class="legend"><button v-for="(s, i) in lines" :key="s.name" :aria-pressed="String(!hidden[s.name])"
          @click="toggle(s.name)" :title="'show or hide ' + s.name"><span class="swatch" :style="{background: css(i, s), margin: 0}"></span>{{ s.name }} <b>{{ value(s) }}</b></button></div>
      </div>
      <canvas ref="canvas" role="img" tabindex="0" :aria-label="label" :style="{height: height + 'px'}"
        @pointermove="move" @pointerleave="leave" @pointerdown="down" @pointerup="up" @dblclick="reset" @keydown="key"></canvas>
      <div v-if="tip" class="tip" :style="tip.style"><div class="dim">step {{ tip.x }}</div>
        <div v-for="row in tip.rows" :key="row.name"><span class="swatch" :style="{background: row.color}"></span>{{ row.name }} <b>{{ row.value }}</b></div>
        <div v-for="e in tip.events" :key="e" class="dim">{{ e }}</div></div>
    </figure>`,
  props: { title: String, series: Array, events: Array, height: { type: Number, default: 170 }, low: Number, high: Number, size: { type: Number, default: 2400 } },
  data() { return { lines: [], hidden: {}, tip: null, at: null, zoom: null, drag: null }; },
  created() { this.take(this.series || []); this.events_now = this.events || []; },
  mounted() {
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.$refs.canvas);
    this.theme = () => this.draw();
    this.heard = (e) => this[e.detail.kind](e.detail.what);
    window.addEventListener("themechange", this.theme);
    window.addEventListener("charts", this.heard);
    this.draw();
  },
  unmounted() { this.watcher.disconnect(); window.removeEventListener("themechange", this.theme); window.removeEventListener("charts", this.heard); },
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
        let x = [...s.x], y = [...s.y];
        more[0].forEach((step, i) => { if (!x.length || step > x[x.length - 1]) { x.push(step); y.push(more[1][i]); } });
        if (x.length > this.size) [x, y] = [x, y].map((all) => all.filter((_, i) => i % 2 || i > x.length - 100));
        return Object.freeze({ ...s, x, y });
      });
      this.draw();
    },
    css(i, s) { return s.color || `var(--c${i % 8})`; },
    ink(i, s) { return rlearner.color(s.color ? s.color.slice(4, -1) : `--c${i % 8}`); },
    value(s) { return s.y.length ? rlearner.number(s.y[s.y.length - 1]) : "–"; },
    toggle(name) { this.hidden = { ...this.hidden, [name]: !this.hidden[name] }; this.draw(); },
    ranges() {
      const shown = this.lines.filter((s) => !this.hidden[s.name]);
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
      const [x0, x1, y0, y1] = this.ranges(), line = rlearner.color("--line"), dim = rlearner.color("--dim");
      const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (w - LEFT - RIGHT), Y = (y) => TOP + (1 - (y - y0) / (y1 - y0)) * (h - TOP - BOTTOM);
      this.map = { x0, x1, X, w };
      c.font = "11px system-ui, sans-serif"; c.lineWidth = 1; c.textBaseline = "middle"; c.textAlign = "right";
      for (const v of ticks(y0, y1, h < 120 ? 3 : 4)) {
        c.strokeStyle = line; c.beginPath(); c.moveTo(LEFT, Math.round(Y(v)) + 0.5); c.lineTo(w - RIGHT, Math.round(Y(v)) + 0.5); c.stroke();
        c.fillStyle = dim; c.fillText(rlearner.tick(+v.toPrecision(4)), LEFT - 6, Y(v));
      }
      c.textAlign = "center"; c.textBaseline = "alphabetic";
      for (const v of ticks(x0, x1, Math.max(2, Math.floor(w / 110)))) if (Number.isInteger(v)) c.fillText(v.toLocaleString("en-US"), X(v), h - 5);
      c.save(); c.beginPath(); c.rect(LEFT, 0, w - LEFT - RIGHT, h - BOTTOM + 4); c.clip();
      for (const e of this.events_now) if (e.step >= x0 && e.step <= x1) {
        c.strokeStyle = e.kind === "death" || e.kind === "failed" ? rlearner.color("--bad") : e.kind === "epoch" ? rlearner.color("--warn") : dim;
        c.globalAlpha = 0.45; c.setLineDash(e.kind === "checkpoint" ? [1, 4] : [3, 3]);
        c.beginPath(); c.moveTo(X(e.step), TOP); c.lineTo(X(e.step), h - BOTTOM); c.stroke();
        c.setLineDash([]); c.globalAlpha = 1;
        c.fillStyle = c.strokeStyle; c.beginPath(); c.moveTo(X(e.step) - 3, h - BOTTOM + 4); c.lineTo(X(e.step) + 3, h - BOTTOM + 4); c.lineTo(X(e.step), h - BOTTOM - 1); c.fill();
      }
      this.lines.forEach((s, i) => {
        if (this.hidden[s.name]) return;
        const ink = this.ink(i, s);
        if (s.low) {
          c.globalAlpha = 0.16; c.fillStyle = ink; c.beginPath();
          for (let k = 0; k < s.x.length; k++) c.lineTo(X(s.x[k]), Y(s.high[k]));
          for (let k = s.x.length - 1; k >= 0; k--) c.lineTo(X(s.x[k]), Y(s.low[k]));
          c.fill(); c.globalAlpha = 1;
        }
        c.strokeStyle = ink; c.fillStyle = ink; c.lineWidth = 1.5; c.lineJoin = "round"; c.beginPath();
        for (let k = 0; k < s.x.length; k++) c.lineTo(X(s.x[k]), Y(s.y[k]));
        c.stroke();
        if (s.dots || s.x.length < 3) for (let k = 0; k < s.x.length; k++) { c.beginPath(); c.arc(X(s.x[k]), Y(s.y[k]), 2.5, 0, 7); c.fill(); }
      });
      if (this.drag) { c.globalAlpha = 0.15; c.fillStyle = rlearner.color("--accent"); c.fillRect(this.drag[0], TOP, this.drag[1] - this.drag[0], h - TOP - BOTTOM); c.globalAlpha = 1; }
      if (this.at !== null) { c.strokeStyle = dim; c.lineWidth = 1; c.beginPath(); c.moveTo(Math.round(X(this.at)) + 0.5, TOP); c.lineTo(Math.round(X(this.at)) + 0.5, h - BOTTOM); c.stroke(); }
      c.restore();
    },
    show(x) {
      const rows = [];
      let at = null;
      this.lines.forEach((s, i) => {
        if (this.hidden[s.name] || !s.x.length) return;
        const k = nearest(s.x, x);
        if (at === null || Math.abs(s.x[k] - x) < Math.abs(at - x)) at = s.x[k];
        const band = s.low ? ` (${rlearner.number(s.low[k])} to ${rlearner.number(s.high[k])})` : "";
        rows.push({ name: s.name, color: this.ink(i, s), value: rlearner.number(s.y[k]) + band });
      });
      if (at === null) return;
      const px = this.map.X(at), near = (this.map.x1 - this.map.x0) / this.map.w * 5;
      const events = this.events_now.filter((e) => Math.abs(e.step - at) <= near).slice(0, 4).map((e) => e.text);
      this.at = at;
      this.tip = { x: at.toLocaleString("en-US"), rows, events, style: { top: "34px", ...(px > this.map.w / 2 ? { right: `${this.map.w - px + 10}px` } : { left: `${px + 10}px` }) } };
      this.draw();
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
      const s = this.lines.find((one) => !this.hidden[one.name] && one.x.length);
      if (!s) return;
      const at = this.at === null ? s.x.length - 1 : nearest(s.x, this.at);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: s.x.length - 1 }[e.key];
      if (e.key === "Escape") { this.leave(); this.reset(); }
      if (to === undefined) return;
      e.preventDefault(); this.show(s.x[Math.min(Math.max(to, 0), s.x.length - 1)]);
    },
  },
};
