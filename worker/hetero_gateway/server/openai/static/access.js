// Calls to this gateway, with the key that the reader gave. The key lives in this module's memory and nowhere else.

let key = "";

/** Call the gateway with the key, if there is one. */
export function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
}

/** Use this key from now on; "" for none. */
export function useKey(text) {
  key = text.trim();
}

/** Return what an answer that is no success says. */
export async function problemOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answers ${answer.status}`;
  }
}
