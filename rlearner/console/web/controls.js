// Above the charts: smoothing, the axis, and the charts that are hidden.
export default {
  template: `
    <div class="form controls" role="group" aria-label="how the charts are shown">
      <label>smoothing: {{ Math.round(view.smoothing * 100) }} % of the curve
        <input type="range" min="0" max="0.5" step="0.01" name="smoothing" :value="view.smoothing" @input="slide" @change="keep"></label>
      <div class="segment" role="group" aria-label="axis">
        <button v-for="(text, name) in axes" :key="name" :aria-pressed="String(view.axis === name)" @click="change({axis: name})">{{ text }}</button></div>
      <template v-if="arranged">
        <button v-for="title in hidden" :key="title" class="btn" :aria-label="'show ' + title" @click="toggle(title)">+ {{ title }}</button>
        <button v-if="changed" class="btn" @click="reset">reset the charts</button></template>
    </div>`,
  props: { clock: Object, kept: Object, arranged: Boolean },
  data() { return { view: rlearner.charts.view, axes: { step: "steps", time: "time" } }; },
  computed: {
    hidden() { return this.view.hidden; },
    changed() { return this.view.order.length + this.view.hidden.length + this.view.wide.length + Object.keys(this.view.lines).length > 0; },
  },
  created() {
    this.set_clock(this.clock || { x: [], y: [] });
    rlearner.charts.begin(this.kept);
    this.view = rlearner.charts.view;
    this.heard = () => { this.view = rlearner.charts.view; };
    this.points = (e) => { if (e.detail.kind === "points" && e.detail.what.time) rlearner.charts.tick(...e.detail.what.time); };
    window.addEventListener("chartview", this.heard);
    window.addEventListener("charts", this.points);
  },
  mounted() { // what other parts of the page changed is kept, too
    this.send = () => { if (rlearner.charts.is_kept) this.$emit("keep", rlearner.charts.view); };
    window.addEventListener("chartview", this.send);
  },
  unmounted() {
    for (const listener of [this.heard, this.send]) window.removeEventListener("chartview", listener);
    window.removeEventListener("charts", this.points);
  },
  methods: {
    set_clock(clock) { rlearner.charts.clock = { x: [...clock.x], y: [...clock.y] }; },
    slide(e) { this.view = rlearner.charts.view = { ...this.view, smoothing: Number(e.target.value) }; window.dispatchEvent(new Event("chartdraw")); },
    keep(e) { this.change({ smoothing: Number(e.target.value) }); },
    change(news) { rlearner.charts.change(news); },
    toggle(title) { rlearner.charts.toggle("hidden", title); },
    reset() { rlearner.charts.reset(); },
  },
};
