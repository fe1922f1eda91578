// Search on pages that are opened as files: browsers start no worker from file://, so the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => {
        const attach = () => {
          document.body.append(this.frame);
          const inner = this.frame.contentWindow;
          inner.importScripts = () => Promise.resolve(); // languages other than English bring scripts; English none
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = this.frame.contentDocument.createElement("script");
          script.src = new URL(address, document.baseURI);
          script.onload = () => resolve(inner);
          this.frame.contentDocument.body.append(script);
        };
        document.body ? attach() : addEventListener("DOMContentLoaded", attach);
      });
    }
    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
