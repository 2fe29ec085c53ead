import { parentPort, workerData } from 'node:worker_threads';
import { BeatAgent } from './beat-agent';
import type { BeatConfig, ToBeat } from './beat-messages';

/** Entry of the beat's worker thread. */
const agent = new BeatAgent(workerData as BeatConfig, (message) => parentPort?.postMessage(message));
parentPort?.on('message', (message: ToBeat) => {
  if (message.type === 'stop') void agent.stop().then(() => parentPort?.close());
  else agent.receive(message);
});
agent.start();
