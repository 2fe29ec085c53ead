const grouped = new Intl.NumberFormat('en-US');

/** 1,776 */
export const digits = (count: number): string => grouped.format(count);

export const plural = (count: number, noun: string): string => `${digits(count)} ${noun}${count === 1 ? '' : 's'}`;

export const seconds = (ms: number): string => `${(ms / 1000).toFixed(1)} s`;

/** A file's name may hold anything, a terminal's control sequences too. */
export const printable = (text: string): string => text.replace(/\p{C}/gu, '\uFFFD');
