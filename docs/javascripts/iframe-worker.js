// Search runs in a worker, and browsers start none from file://. There, a hidden frame does its work.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.listen = event => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      addEventListener("message", this.listen);
      const inside = this.frame.contentWindow.document;
      this.ready = new Promise(resolve => { this.frame.addEventListener("load", resolve); });
      inside.open();
      inside.write("<script>postMessage = data => parent.postMessage(data, '*');<\/script>");
      inside.write(`<script src="${url}"><\/script>`);
      inside.close();
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    terminate() {
      removeEventListener("message", this.listen);
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
