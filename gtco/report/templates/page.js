// Without this script a stage is chosen by its link alone (:target). With it the choice is also
// marked in the pictures and the table, and the arrow keys go from stage to stage.
(function () {
  "use strict";
  function chosen() {
    var found = /^#((?:v\d+-)?)(?:stage|box)-(\d+)$/.exec(location.hash);
    return found && { prefix: found[1], number: Number(found[2]) };
  }
  function each(selector, act) {
    document.querySelectorAll(selector).forEach(act);
  }
  function show() {
    var now = chosen();
    if (now && /box-/.test(location.hash)) {
      location.replace("#" + now.prefix + "stage-" + now.number);
      return;
    }
    each(".chosen", function (old) {
      old.classList.remove("chosen");
      old.removeAttribute("aria-current");
    });
    if (!now) return;
    var id = "#" + now.prefix + "stage-" + now.number;
    each('a[href="' + id + '"]', function (link) {
      if (link.closest(".side")) return;
      var row = link.closest("tr");
      (row || link).classList.add("chosen");
      link.setAttribute("aria-current", "true");
    });
    var box = document.getElementById(now.prefix + "box-" + now.number);
    if (!box) return;
    each('.edges path[data-from="' + now.number + '"], .edges path[data-to="' + now.number + '"]', function (edge) {
      if (edge.closest("svg") === box.closest("svg")) edge.classList.add("chosen");
    });
    var pane = box.closest(".scroll"), at = box.getBoundingClientRect(), frame = pane.getBoundingClientRect();
    if (at.top < frame.top || at.bottom > frame.bottom)
      pane.scrollTop += at.top - frame.top - (frame.height - at.height) / 2;
    if (at.left < frame.left || at.right > frame.right)
      pane.scrollLeft += at.left - frame.left - (frame.width - at.width) / 2;
  }
  addEventListener("hashchange", show);
  addEventListener("keydown", function (event) {
    var step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    var now = chosen();
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape" && now) {
      location.hash = "#main";
      return;
    }
    var at = document.activeElement;
    if (!step || !now || !at || !at.closest(".graph, .stage, .stages")) return;
    var next = document.getElementById(now.prefix + "stage-" + (now.number + step));
    if (!next) return;
    event.preventDefault();
    location.hash = "#" + next.id;
    var box = at.closest(".graph") && document.getElementById(now.prefix + "box-" + (now.number + step));
    (box || next).focus({ preventScroll: true });
  });
  each(".back", function (link) {
    link.addEventListener("click", function (event) {
      var box = document.getElementById(link.getAttribute("href").slice(1));
      event.preventDefault();
      box.closest(".scroll").scrollIntoView({ block: "nearest" });
      box.focus();
    });
  });
  show();
})();
