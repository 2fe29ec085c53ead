import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import { BeatAgent } from './beat-agent';
import type { BeatConfig, FromBeat, ToBeat } from './beat-messages';

/** A running beat, wherever it runs. */
export interface BeatRunner {
  readonly threaded: boolean;
  post(message: ToBeat): void;
  stop(): Promise<void>;
}

const canBeCloned = (config: BeatConfig): boolean => {
  try {
    structuredClone(config);
    return true;
  } catch {
    return false;
  }
};

/**
 * Starts the beat in a thread of its own. Settings that cannot be cloned to a thread (a password function, TLS callbacks, a stream
 * factory) leave only the main thread: then a handler that blocks the event loop for longer than the TTL loses its leases.
 */
export function startBeat(
  config: BeatConfig,
  onMessage: (message: FromBeat) => void,
  onExit: (why: string) => void,
): BeatRunner {
  if (!canBeCloned(config)) return startInMainThread(config, onMessage);
  const thread = new Worker(join(__dirname, 'beat-thread.js'), { workerData: config, name: 'leasehold beat' });
  thread.on('message', onMessage);
  let stopping = false;
  const exited = new Promise<void>((resolve) => thread.once('exit', () => resolve()));
  let why: string | undefined;
  thread.on('error', (error) => (why = error.message)); // 'exit' follows.
  thread.on('exit', (code) => !stopping && onExit(why ?? `the beat thread ended with code ${code}`));
  // The thread must not keep the process alive, nor end before the drain: the service holds its own timer.
  thread.unref();
  return {
    threaded: true,
    post: (message) => thread.postMessage(message),
    stop: async () => {
      stopping = true;
      thread.postMessage({ type: 'stop' });
      const timer = setTimeout(() => void thread.terminate(), 2000);
      await exited;
      clearTimeout(timer);
    },
  };
}

function startInMainThread(config: BeatConfig, onMessage: (message: FromBeat) => void): BeatRunner {
  const agent = new BeatAgent(config, (message) => setImmediate(() => onMessage(message)));
  agent.start();
  return { threaded: false, post: (message) => agent.receive(message), stop: () => agent.stop() };
}
