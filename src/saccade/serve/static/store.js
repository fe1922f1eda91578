// The conversation over a reload: turns of this tab in the browser's database; without storage, nothing is kept.

const TURNS = "turns", CHAT = "saccade-chat", OPEN = "saccade-open", DAY = 24 * 3600 * 1000;
let opening = null, chat = 0;

// A word of this tab; "" for one that was never kept.
export function recall(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

export function remember(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    // blocked or full: the page works on without
  }
}

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("saccade", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TURNS);
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
  return opening;
}

// Result of one action on the turns; null where there is no storage, or no room.
async function work(mode, action) {
  try {
    const transaction = (await database()).transaction(TURNS, mode);
    const request = action(transaction.objectStore(TURNS));
    transaction.commit(); // at once: the page may be about to go
    return await new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  } catch {
    return null;
  }
}

const all = (of) => IDBKeyRange.bound([of], [of, []]);

export function keepTurn(number, turn) {
  return work("readwrite", (turns) => turns.put(turn, [chat, number]));
}

export function dropTurns(from = 0) {
  return work("readwrite", (turns) => turns.delete(IDBKeyRange.bound([chat, from], [chat, []])));
}

// Turns of this tab, oldest first. A duplicated tab goes on with a copy of them.
export async function restoreTurns() {
  const before = Number(recall(CHAT)), isCopy = recall(OPEN) === "yes";
  chat = before && !isCopy ? before : Date.now() + Math.random();
  remember(CHAT, chat);
  remember(OPEN, "yes");
  const kept = (before && (await work("readonly", (turns) => turns.getAll(all(before))))) || [];
  if (isCopy) await Promise.all(kept.map((turn, number) => keepTurn(number, turn)));
  work("readwrite", (turns) => turns.delete(IDBKeyRange.upperBound([Math.min(chat, Date.now() - DAY)], true)));
  return kept;
}

addEventListener("pagehide", () => remember(OPEN, "no"));
addEventListener("pageshow", (event) => { if (event.persisted) remember(OPEN, "yes"); });
