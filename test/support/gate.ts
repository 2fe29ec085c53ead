/** A promise that the test settles: it lets code go on at the moment of the test's choice. */
export interface Gate<T = void> {
  readonly promise: Promise<T>;
  readonly isOpen: boolean;
  open(value: T): void;
  fail(error: unknown): void;
}

export function gate<T = void>(): Gate<T> {
  let isOpen = false;
  let resolve!: (value: T) => void;
  let reject!: (error: unknown) => void;
  const promise = new Promise<T>((onOpen, onFail) => {
    resolve = onOpen;
    reject = onFail;
  });
  // A gate that fails before anybody waits at it must not end the process.
  promise.catch(() => undefined);
  return {
    promise,
    get isOpen() {
      return isOpen;
    },
    open(value) {
      isOpen = true;
      resolve(value);
    },
    fail(error) {
      isOpen = true;
      reject(error);
    },
  };
}
