"use strict";
// Says on the page itself when something on it fails, also for readers without a console.
(function () {
  function tell(what) {
    const show = function () {
      const trouble = document.getElementById("trouble");
      trouble.hidden = false;
      trouble.append("Something on this page failed: " + what + ". ");
    };
    if (document.getElementById("trouble")) show();
    else document.addEventListener("DOMContentLoaded", show);
  }
  addEventListener("error", function (event) {
    tell(event.message || "a part could not be loaded");
  }, true);
  addEventListener("unhandledrejection", function (event) {
    tell(String(event.reason));
  });
  addEventListener("securitypolicyviolation", function (event) {
    tell("the page tried to use " + event.violatedDirective + " " + event.blockedURI);
  });
})();
